"""`Translator` and `fairseq-ccpr translate`: text to translation, by what the datastore remembers."""

from __future__ import annotations

import html
import io
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.search import BeamSearch

from fairseq_ccpr import Translator
from fairseq_ccpr.decoding import beam_search
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.inference.alignment import with_markup
from fairseq_ccpr.inference.system import encode, length_limit
from fairseq_ccpr.text.sentences import Mark
from tests.helpers import PROGRAM, ROOT, call, hypotheses, own_bytes, refused, texts
from tests.small_models import World, subword_options

SHORT = {"max_len_b": 25, "device": "cpu", "tokens_temperature": 5}


@pytest.fixture(scope="module")
def translator(world: World) -> Translator:
    return Translator(datastore=world.datastore, **SHORT)  # the datastore remembers all else


def test_translations_are_those_of_fairseq_generate(
    world: World, translator: Translator, sentences: list[str]
) -> None:
    words = [*world.options("--batch-size", 1), "--bpe", "sentencepiece", "--sentencepiece-model", world.spm]
    translator.cfg.dataset.batch_size = 1
    try:
        assert texts(translator, sentences) == hypotheses(call("fairseq-generate", *words).stdout)
    finally:
        translator.cfg.dataset.batch_size = None
    assert all(
        one.score < 0 and len(one.token_scores) == len(one.tokens) + 1
        for one in translator.translate(sentences)
    )


def test_every_door_searches_by_runs(
    world: World,
    translator: Translator,
    sentences: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With and without retrieval."""
    searched: list[str] = []

    def noted(name: str, search: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: searched.append(name) or search(*given, **named)

    monkeypatch.setattr(BeamSearch, "step", noted("fairseq", BeamSearch.step))
    monkeypatch.setattr(beam_search, "best_continuations", noted("runs", beam_search.best_continuations))
    doors: dict[str, list[object]] = {
        "compare": [], "tune": ["--combiner", "fixed", "--decode", 1, "--output", tmp_path / "options"],
        "explain": [*subword_options(world), "--sentences", 1, "--output", tmp_path / "page.html"], "fairseq-generate": [],
    }  # fmt: skip
    texts(translator, sentences[:1])  # as translate and serve do
    assert {*searched} == {"runs"}
    searched.clear()
    list(translator.translate(sentences[:1], retrieve=False))
    assert {*searched} == {"runs"}
    for command, extra in doors.items():
        searched.clear()
        call(command, *world.options("--no-progress-bar", *extra))
        assert {*searched} == {"runs"}, command
    searched.clear()
    texts(Translator(datastore=world.datastore, sampling=True, **SHORT), sentences[:1])
    assert not searched  # another search than the beam's is left as it is


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_translates_as_the_cpu_does(world: World, translator: Translator, sentences: list[str]) -> None:
    """But for hypotheses that are level, which rounding parts."""
    with Translator(datastore=world.datastore, **{**SHORT, "device": "cuda"}) as other:
        pairs = list(zip(other.translate(sentences), translator.translate(sentences), strict=True))
    differences = [abs(one.score - two.score) for one, two in pairs if one.text == two.text]
    assert len(differences) > 0.9 * len(pairs) and max(differences) < 1e-2


def test_without_a_datastore_the_model_translates_alone(
    world: World, translator: Translator, sentences: list[str], decode: Callable
) -> None:
    alone = Translator(
        world.model, data=world.data_bin, **{k: v for k, v in SHORT.items() if k != "tokens_temperature"}
    )
    assert alone.signature is None and texts(alone, sentences) != texts(translator, sentences)
    silent = Translator(world.model, datastore=world.datastore, tokens_lambda=0, **SHORT)
    assert texts(silent, sentences) == texts(alone, sentences)


def test_order_empty_and_long_sentences(translator: Translator, sentences: list[str]) -> None:
    long = "Wort" * 10_000
    given = [sentences[0], "", long, " \t ", sentences[1]]
    made = list(translator.translate(iter(given)))
    assert [one.source for one in made] == given
    assert [one.text for one in made[1:4]] == ["", "", ""]
    assert [bool(one.fault) for one in made] == [False, False, True, False, False]
    assert "tokens, and the model takes" in made[2].fault
    assert [made[0].text, made[4].text] == texts(translator, sentences[:2])
    assert list(translator.translate([])) == [] and texts(translator, ["", " "]) == ["", ""]
    with pytest.raises(ConfigurationError, match="a list of sentences, not one string"):
        next(iter(translator.translate("Guten Morgen.")))


def test_a_sentence_that_is_too_long_is_translated_in_parts(
    translator: Translator, sentences: list[str]
) -> None:
    """At ends of sentences, clauses or at spaces; of each rank the parts' translations are joined."""
    clause, most = "Und er ging, " * 300 + "da kam er", length_limit(translator.task, translator.models)
    long = f"{sentences[0]} {clause}. {'Wort ' * 900}"
    first, found = translator.translate([sentences[0], long], nbest=2)
    assert not found.fault and found.parts[0].text == first.text and len(found.parts) >= 4
    assert all(len(encode(part.source, translator.task)) <= most for part in found.parts)
    assert "".join(part.source for part in found.parts).replace(" ", "") == long.replace(" ", "")
    assert all(part.source.endswith(",") for part in found.parts[1:2])
    assert found.text.split() == " ".join(part.text for part in found.parts).split()
    others = " ".join(part.alternatives[0].text for part in found.parts)
    assert found.alternatives[0].text.split() == others.split()
    assert list(translator.translate([part.source for part in found.parts], nbest=2)) == list(found.parts)
    assert len(found.token_scores) == len(found.tokens) + len(found.parts)
    mean = sum(found.token_scores) / len(found.token_scores)
    assert found.score == pytest.approx(mean, rel=1e-3)
    marks = [
        Mark(start := long.rindex("da kam"), start + 2, ["<b>"], ["</b>"]),
        Mark(seam := long.index(found.parts[2].source) - 1, seam, ["<i/>"]),
    ]
    ((parts,),) = with_markup(translator, [[found]], [marks])
    marked = "".join(map(str, parts))
    assert re.sub("<.*?>", "", marked) == html.escape(found.text, quote=False)
    inside = re.sub("<.*?>", "", marked[: marked.index("<b>")])
    lengths = [len(html.escape(part.text, quote=False)) + 1 for part in found.parts]
    within = [n for n, part in enumerate(found.parts) if "da kam" in part.source]
    assert sum(lengths[: within[0]]) <= len(inside) < sum(lengths[: within[0] + 1])
    inside = re.sub("<.*?>", "", marked[: marked.index("<i/>")])
    assert sum(lengths[:2]) <= len(inside) < sum(lengths[:3])


def test_sentences_are_read_a_window_at_a_time(translator: Translator, sentences: list[str]) -> None:
    read = []

    def stream() -> Iterator[str]:
        for sentence in sentences:
            read.append(sentence)
            yield sentence

    first = next(iter(translator.translate(stream(), window=4)))
    assert first.source == sentences[0] and len(read) == 4


def test_threads_and_translators_do_not_mix_their_queries(
    world: World, translator: Translator, sentences: list[str]
) -> None:
    other = Translator(datastore=world.datastore, tokens_lambda=0.9, beam=2, **SHORT)
    wanted = [texts(translator, sentences), texts(other, sentences)]
    assert wanted[0] != wanted[1]
    found: dict[int, list[str]] = {}

    def work(number: int) -> None:
        found[number] = texts((translator, other)[number % 2], sentences)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(4)] == wanted * 2


def test_alternatives_and_other_options_of_fairseq(world: World, sentences: list[str]) -> None:
    several = Translator(datastore=world.datastore, nbest=3, beam=4, lenpen=0.6, **SHORT)
    (made,) = several.translate(sentences[:1])
    scores = [made.score, *(one.score for one in made.alternatives)]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    for named, sentence in (
        ({"baem": 5}, "no option --baem; did you mean --beam"),
        ({"tokens_kk": 5}, "no option --tokens-kk; did you mean --tokens-k"),
        ({"tokens_k": 0}, "--tokens-k is 0"),
        ({"baem": None}, "no option baem; did you mean beam"),
        ({"tokens_confidence": True}, "--tokens-confidence needs keys of length 1"),
        ({"beam": "wide"}, "beam.*wide"),
        ({"beam": 0}, "--beam is 0: at least 1 is needed"),
        ({"score_reference": True}, "--score-reference is for fairseq-generate alone"),
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            Translator(datastore=world.datastore, **named)
    with pytest.raises(ConfigurationError, match="precision is int8: choose one of auto, fp32"):
        Translator(datastore=world.datastore, precision="int8")


def test_bf16_is_the_same_model(world: World, translator: Translator, sentences: list[str]) -> None:
    half = Translator(datastore=world.datastore, precision="bf16", **SHORT)
    # whose parameters, and so its identity, stay what they are
    assert all(parameter.dtype == torch.float32 for parameter in half.models[0].parameters())
    assert str(half.signature).replace(" precision:bf16", " precision:fp32") == translator.signature
    alike = [
        a.token_scores[0] - b.token_scores[0]
        for a, b in zip(half.translate(sentences), translator.translate(sentences))
    ]
    assert 0 < sum(map(abs, alike)) / len(alike) < 0.2


def test_explanation_of_a_sentence(translator: Translator, sentences: list[str], tmp_path: Path) -> None:
    explanation = translator.explain(sentences[:2], neighbours=4)
    assert [one.source for one in explanation.sentences] == sentences[:2]
    assert [one.translation for one in explanation.sentences] == texts(translator, sentences[:2])
    assert all(token.neighbours for one in explanation.sentences for token in one.tokens)
    explanation.save(tmp_path / "page.html")
    assert sentences[0] in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert len(translator.explain(sentences[0]).sentences) == 1
    with pytest.raises(ConfigurationError, match="all are empty"):
        translator.explain([" "])


def test_a_tokenizer_needs_no_languages_and_a_small_batch_holds_one_sentence(
    world: World, sentences: list[str]
) -> None:
    both = Translator(
        datastore=world.datastore, tokenizer="moses", moses_no_escape=True, max_tokens=3, **SHORT
    )
    assert all(texts(both, sentences[:2])) and both.preprocessing.options["moses_no_escape"] is True


def translate(*words: object, typed: bytes = b"", check: bool = True) -> subprocess.CompletedProcess[bytes]:
    line = [*PROGRAM, "translate", *map(str, words), "--cpu", "--max-len-b", "25"]
    done = subprocess.run(line, input=typed, capture_output=True, cwd=ROOT)
    assert not check or done.returncode == 0, done.stderr.decode()
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done


def test_text_goes_from_standard_input_to_standard_output(
    world: World, translator: Translator, sentences: list[str]
) -> None:
    typed = "".join(f"{sentence}\n" for sentence in [*sentences[:3], "", *sentences[3:5]]).encode()
    done = translate("--datastore", world.datastore, "--tokens-temperature", 5, typed=typed)
    lines = done.stdout.decode().split("\n")
    assert lines == [*texts(translator, sentences[:3]), "", *texts(translator, sentences[3:5]), ""]
    assert b"retrieval signature: retriever:TokenRetriever|" in done.stderr


def called(monkeypatch: pytest.MonkeyPatch, typed: bytes, *words: object) -> Any:
    """Run the command in this process."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed)))
    return call("translate", *words, "--cpu", "--max-len-b", 25, "--quiet", check=False)


def test_files_and_json(
    world: World, sentences: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.txt").write_text(sentences[0] + "\n", encoding="utf-8")
    (tmp_path / "two.txt").write_text(f"\n{sentences[1]}", encoding="utf-8")
    words = ["--input", tmp_path / "one.txt", tmp_path / "two.txt", "--output-format", "jsonl", "--nbest", 2]
    done = called(monkeypatch, b"", "--datastore", world.datastore, *words)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["source"] for row in rows] == [sentences[0], "", sentences[1]]
    assert rows[0]["score"] < 0 and len(rows[0]["alternatives"]) == 1 and rows[1]["tokens"] == []
    refused(
        called(monkeypatch, b"", "--datastore", world.datastore, "--input", "none.txt"), "no file none.txt"
    )


def test_bad_text_is_named_by_its_line(
    world: World, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = sentences[0].encode()
    done = called(monkeypatch, good + b"\n\xff\xfe\n", "--datastore", world.datastore)
    refused(done, "the standard input, line 2: the bytes are not UTF-8")
    done = called(monkeypatch, b"Wort" * 10_000 + b"\n" + good, "--datastore", world.datastore)
    assert done.returncode == 1 and len(done.stdout.splitlines()) == 2 and done.stdout.splitlines()[1]
    assert "line 1 has no translation: " in done.stderr and "Traceback" not in done.stderr
    done = called(monkeypatch, good + b"\n" + b"Wo, " * 600, "--datastore", world.datastore)
    assert done.returncode == 0 and all(done.stdout.splitlines())
    assert "line 2 is longer than the model takes: it was translated in 2 parts" in done.stderr
    with_mark = called(monkeypatch, b"\xef\xbb\xbf" + good, "--datastore", world.datastore)
    assert with_mark.stdout == called(monkeypatch, good, "--datastore", world.datastore).stdout


@pytest.mark.full
def test_memory_of_a_long_run_is_flat(both: Path, sentences: list[str]) -> None:
    translator = Translator(datastore=both, **SHORT, phrases_k=3)
    held = []
    for rounds in (3, 9):
        for _ in range(rounds):
            texts(translator, sentences)
        held.append(own_bytes())
    assert held[1] - held[0] < 1 << 20


@pytest.mark.full
def test_a_closed_pipe_ends_it_quietly(world: World, sentences: list[str], tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(f"{sentences[0]}\n" * 300, encoding="utf-8")
    line = [
        *PROGRAM,
        "translate",
        "--datastore",
        world.datastore,
        "--input",
        tmp_path / "in.txt",
        "--cpu",
        "--quiet",
    ]
    words = [*map(str, line), "--buffer-size", "1", "--output-format", "jsonl", "--max-len-b", "5"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read().decode()
    assert process.wait() == 141 and "Traceback" not in said and "Broken" not in said


def test_a_translator_that_was_closed_refuses_to_work(
    world: World, tmp_path: Path, sentences: list[str]
) -> None:
    store = Path(shutil.copytree(world.datastore, tmp_path / "store"))
    with Translator(datastore=store, **SHORT) as translator:
        assert repr(translator) == f"Translator('{world.model}', datastore='{store}', device='cpu')"
        number = translator.learn("Es ist gut.", "It is good.").id
        begun = translator.translate(sentences, window=1)
        next(begun)
    translator.close()  # twice is once
    for work in (
        lambda: translator.translate(sentences),
        lambda: next(begun),
        lambda: translator.learn("Es ist gut.", "It is good."),
        lambda: translator.learn_all([]),
        lambda: translator.forget(number),
        translator.memory,
        translator.lock,
        translator.compact,
        lambda: translator.explain(sentences[0]),
    ):
        with pytest.raises(
            ConfigurationError, match=r"^Translator\(.*\) was closed, and does no more work: load another$"
        ):
            work()
    with Translator(datastore=store, **SHORT) as other:
        assert other.lock() and [one.id for one in other.memory()] == [number]
    with Translator(world.model, data=world.data_bin, device="cpu") as alone:
        assert repr(alone) == f"Translator('{world.model}', device='cpu')"
