"""Retrieval in fairseq's multilingual tasks: random models of two language pairs, as fairseq-train leaves them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from fairseq import utils

from fairseq_ccpr import Translator
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.breakdown import break_down
from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.decoding.retrieval_task import find_parts
from fairseq_ccpr.decoding.task import task_words
from fairseq_ccpr.decoding.token_retriever import Neighbours, TokenRetriever
from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.evaluation.grids import force_decode_text
from fairseq_ccpr.evaluation.test_set import load
from fairseq_ccpr.inference.resources import configure
from fairseq_ccpr.inference.system import System, batches_of, encode
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import (
    DEMO,
    USER_DIR,
    assert_learned_as_built,
    call,
    equal,
    output_of,
    refused,
    write_lines,
)
from tests.small_models import random_encoders

COUNT = 16
SIZES = "--encoder-layers 1 --decoder-layers 2 --encoder-embed-dim 32 --encoder-ffn-embed-dim 64 --share-all-embeddings "
SIZES += "--encoder-attention-heads 2 --decoder-attention-heads 2 --optimizer adam --lr 1e-3 --criterion cross_entropy "
SIZES += "--max-tokens 1000 --max-update 2 --no-epoch-checkpoints --disable-validation --no-progress-bar --cpu --dropout 0"
KINDS = {
    "multi": (
        "translation_multi_simple_epoch",
        "--arch transformer --lang-pairs de-en,en-de --langs de,en,fr "
        "--encoder-langtok src --decoder-langtok --sampling-method temperature",
    ),
    # Of its architecture, too, whose cross-attention is told how wide the beam is.
    "bart": (
        "translation_retrieval_bart",
        "--arch mbart_base --max-update 60 --lr 3e-3 --langs fr,de,en -s de -t en",
    ),
}
LEAST = 0.9  # of the answers that a datastore of them must give back


@dataclass
class Several:
    """A model of several languages, and a datastore of the test subset from German to English."""

    kind: str
    data_bin: Path
    model: Path
    datastore: Path

    def words(self, *extra: object, source: str = "de", target: str = "en") -> list[str]:
        words = [
            "-s",
            source,
            "-t",
            target,
            "--path",
            self.model,
            "--cpu",
            "--gen-subset",
            "test",
            "--max-len-b",
            40,
        ]
        return [str(word) for word in (*words, *extra)]

    def retrieving(self, share: float, *extra: object) -> list[object]:
        """Options of decoding with the datastore, where only the nearest neighbour counts."""
        return [
            "--datastore",
            self.datastore,
            "--tokens-lambda",
            share,
            "--tokens-k",
            2,
            "--tokens-temperature",
            0.1,
            *extra,
        ]

    def decode(
        self, *extra: object, base: bool = False, stock: bool = False, scoring: bool = False
    ) -> dict[int, list[dict[str, Any]]]:
        """Decode the test subset as fairseq-generate does; gives the hypotheses of each sentence.

        `base`: with the model alone, and the beam search that retrieval has. `stock`: as fairseq does it.
        """
        cfg = configure(self.words(*extra), self.data_bin)
        cfg.generation.score_reference = scoring
        utils.set_torch_seed(1)
        task, models = load(cfg)
        make = task.build_base_generator if base or stock else task.build_generator
        generator = make(models, cfg.generation)
        if base and not scoring:
            task.equip(generator, task.alone(models))
        found = {}
        for sample in task.get_batch_iterator(task.dataset("test"), max_tokens=1000).next_epoch_itr(
            shuffle=False
        ):
            found.update(zip(sample["id"].tolist(), task.inference_step(generator, models, sample)))
        return found


@pytest.fixture(scope="module", params=list(KINDS))
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Several:
    folder = tmp_path_factory.mktemp(request.param)
    rows = [row for row in read_pairs(DEMO / "bible.train.tsv.xz") if len(row[1]) < 50][:COUNT]
    table = write_lines(folder / "rows.tsv", *map("\t".join, rows))
    data_bin = folder / "data-bin"
    call(
        "prepare",
        "--train",
        table,
        "--test",
        table,
        "-s",
        "de",
        "-t",
        "en",
        "--pieces",
        300,
        "--output",
        data_bin,
    )
    task, options = KINDS[request.param]
    words = [*SIZES.split(), "--task", task, *options.split(), "--save-dir", folder / "model", "--seed", 3]
    call("fairseq-train", data_bin, "--user-dir", USER_DIR, *words)
    made = Several(request.param, data_bin, folder / "model/checkpoint_last.pt", folder / "datastore")
    words = [
        "-s",
        "de",
        "-t",
        "en",
        "--path",
        made.model,
        "--output",
        made.datastore,
        "--index",
        "exact",
        "--cpu",
        "--quiet",
    ]
    call("build tokens", data_bin, "--subset", "test", *words)
    return made


@pytest.mark.parametrize("search", [["--beam", 1], ["--lenpen", 0.5, "--nbest", 3], None], ids=str)
def test_share_of_zero_equals_the_model_alone_to_the_bit(
    several: Several, search: list[object] | None
) -> None:
    """And that is stock fairseq, but for rounding."""
    words, scoring = search or [], search is None
    found = several.decode(*several.retrieving(0, *words), scoring=scoring)
    assert equal(found, several.decode(*words, base=True, scoring=scoring))
    assert equal(found, several.decode(*words, stock=True, scoring=scoring), tolerance=1e-4)
    changed = several.decode(*several.retrieving(0.9, *words), scoring=scoring)
    assert not equal(changed, found, tolerance=1e-2)


def test_the_model_is_its_own_reverse_model(several: Several, tmp_path: Path) -> None:
    """Target text is translated back by the same checkpoint, with the languages exchanged."""
    lines = [target for _, target in read_pairs(several.data_bin.parent / "rows.tsv")]
    text, output = write_lines(tmp_path / "mono.en", *lines), tmp_path / "store"
    words = ["-s", "de", "-t", "en", "--path", several.model, "--output", output, "--cpu", "--quiet"]
    call("build tokens", several.data_bin, *words, "--monolingual", text, "--reverse-model", several.model)
    pairs = dict(map(reversed, read_pairs(output / "back-translations/pairs.tsv")))
    assert len(pairs) > COUNT / 2 and {*pairs} <= {*lines}
    swapped = write_lines(tmp_path / "swapped.tsv", *map("\t".join, pairs.items()))
    subwords = ["--sentencepiece-model", several.data_bin / "spm.model"]
    subwords += ["--dict", several.data_bin / "dict.en.txt"]
    call("prepare", "--test", swapped, "-s", "en", "-t", "de", *subwords, "--output", tmp_path / "en-de")
    with Translator(several.model, data=tmp_path / "en-de", beam=2, device="cpu") as back:
        assert [one.text for one in back.translate([*pairs])] == [*pairs.values()]


def test_datastore_of_the_answers_gives_the_answers(several: Several) -> None:
    task, _ = load(configure(several.words(), several.data_bin))
    targets = [pair["target"] for pair in task.dataset("test")]

    def right(found: dict[int, list[dict[str, Any]]]) -> int:
        return sum(torch.equal(found[i][0]["tokens"], targets[i]) for i in found)

    assert right(several.decode(*several.retrieving(0.99))) >= LEAST * COUNT
    assert right(several.decode(base=True)) == 0


def test_tags_are_no_keys_and_forced_ones_are_not_searched_for(several: Several) -> None:
    task, _ = load(configure(several.words(), several.data_bin))
    store, dataset = TokenDatastore(several.datastore), task.dataset("test")
    tags = task.tags.ids(task.target_dictionary)
    in_values = np.isin(store.values, list(tags)).sum()
    assert store.section.fingerprints["language_pair"] == "de-en"
    if several.kind == "multi":  # the tag in front is forced
        assert in_values == 0 and store.section.size == dataset.tgt_sizes.sum() - COUNT
    else:  # the tag at the end is the end
        assert in_values == COUNT and store.section.size == dataset.tgt_sizes.sum()
    first = np.flatnonzero(store.provenance[:, 1] == 0)
    assert (
        len(first) == COUNT
        and (np.diff(store.provenance[:, 1])[np.diff(store.provenance[:, 0]) == 0] == 1).all()
    )
    steps, searches = [], []
    forward, search = RetrievalEnsemble.step, TokenRetriever.search

    def watched_step(self: Any, *given: Any, **named: Any) -> Any:
        steps.append(1)
        return forward(self, *given, **named)

    def watched_search(self: TokenRetriever, queries: torch.Tensor, k: int) -> Neighbours:
        searches.append(len(queries))
        return search(self, queries, k)

    with (
        patch.object(RetrievalEnsemble, "step", watched_step),
        patch.object(TokenRetriever, "search", watched_search),
    ):
        cfg = configure(several.words(*several.retrieving(0.5)), several.data_bin)
        task, models = load(cfg)
        generator = task.build_generator(models, cfg.generation)
        sample = dataset.collater([dataset[number] for number in range(6)])
        task.inference_step(generator, models, sample)
    assert len(searches) == len(steps) - task.tags.forced and searches[0] == 6 and searches[1] == 30


def test_breaking_down_a_translation_gives_the_scores_of_beam_search(several: Several) -> None:
    cfg = configure(several.words(*several.retrieving(0.6)), several.data_bin)
    task, models = load(cfg)
    generator = task.build_generator(models, cfg.generation)
    dataset = task.dataset("test")
    sample = dataset.collater([dataset[number] for number in range(4)])
    best = [hypotheses[0] for hypotheses in task.inference_step(generator, models, sample)]
    found = break_down(generator.model, sample, [one["tokens"] for one in best], task.target_dictionary)
    wanted = torch.cat([one["positional_scores"][task.tags.forced :] for one in best])
    assert torch.allclose(found.mixed, wanted, atol=2e-3)
    held_out = force_decode_text("test", [sample], generator.model)
    assert len(held_out.targets) == int(sample["ntokens"]) - 4 * task.tags.forced


def test_given_targets_are_no_beams_however_many_sentences_there_are(several: Several) -> None:
    """The cross-attention of BART's models takes as many rows as the beam is wide for one sentence, if it is let."""
    cfg = configure(several.words(*several.retrieving(0.5), "--beam", 2), several.data_bin)
    task, models = load(cfg)
    ensemble = task.build_generator(models, cfg.generation).model

    def forced(sentences: int) -> dict[int, torch.Tensor]:
        """log p_NMT of the tokens of each sentence, of so many in a batch."""
        found = {}
        for sample in task.get_batch_iterator(task.dataset("test"), max_sentences=sentences).next_epoch_itr(
            shuffle=False
        ):
            targets = sample["target"]
            scores = ensemble.force_decode(sample).whole.log_probs.gather(2, targets.unsqueeze(2)).squeeze(2)
            for number, row, target in zip(sample["id"].tolist(), scores, targets):
                found[number] = row[target != task.target_dictionary.pad()]
        return found

    alone = forced(1)
    for together in (2, 4, COUNT):  # multiples of the beam
        for number, scores in forced(together).items():
            torch.testing.assert_close(scores, alone[number], rtol=1e-4, atol=1e-4)


def test_raw_text_is_translated_as_by_fairseq_and_without_tags(several: Several, tmp_path: Path) -> None:
    texts = [source for source, _ in list(read_pairs(several.data_bin.parent / "rows.tsv"))[:6]]
    named = {
        "device": "cpu",
        "tokens_lambda": 0.9,
        "tokens_k": 2,
        "tokens_temperature": 0.1,
        "max_len_b": 40,
        "beam": 2,
    }
    system = Translator(datastore=several.datastore, **named)
    translations = list(system.translate([*texts, ""]))
    pieces = ["--bpe", "sentencepiece", "--sentencepiece-model", several.data_bin / "spm.model", "--beam", 2]
    words = [
        *several.words(*several.retrieving(0.9), *pieces),
        *task_words(several.model),
        "--user-dir",
        USER_DIR,
    ]
    words[words.index("--gen-subset") : words.index("--gen-subset") + 2] = []
    source = write_lines(tmp_path / "some.de", *texts)
    typed = output_of(call("fairseq-interactive", several.data_bin, *words, "--input", source), "D")
    assert [one.text for one in translations[:6]] == [
        _without_tags(typed[number].split("\t", 1)[1]) for number in range(6)
    ]
    references = [target for _, target in list(read_pairs(several.data_bin.parent / "rows.tsv"))[:6]]
    assert sum(one.text == wanted for one, wanted in zip(translations, references)) >= LEAST * 5.5
    for one in translations[:6]:
        assert (
            not {"__en__", "[en]", "</s>"} & set(one.tokens) and len(one.token_scores) == len(one.tokens) + 1
        )
    assert translations[6].text == ""
    explained = system.explain(texts[:2])
    assert [one.translation for one in explained.sentences] == [one.text for one in translations[:2]]


def _without_tags(text: str) -> str:
    """What fairseq-interactive prints without the tag that it leaves at the end of mBART's translations."""
    return text.removesuffix("[en]").rstrip()


def test_phrases_are_found_in_text_without_tags(several: Several, tmp_path: Path) -> None:
    text = write_lines(
        tmp_path / "text", *(target for _, target in read_pairs(several.data_bin.parent / "rows.tsv"))
    )
    words = [
        "--encoder",
        random_encoders(tmp_path)["ccpr"],
        "--segmentation",
        "all",
        "--max-words",
        2,
        "--cpu",
        "--quiet",
    ]
    call("build phrases", text, "--output", tmp_path / "phrases", *words)
    subwords = ["--bpe", "sentencepiece", "--sentencepiece-model", several.data_bin / "spm.model"]
    words = several.words("--datastore", tmp_path / "phrases", "--phrases-min-similarity", 0, *subwords)
    system = System.of(words, several.data_bin)
    assert system.ensemble is not None and system.ensemble.find(PhraseMemory) is not None
    of_decoder, dictionary = (
        system.ensemble.find(PhraseMemory).candidates.subwords,
        system.task.source_dictionary,
    )
    source = "Und er sprach zu ihnen."
    sample = next(batches_of([encode(source, system.task)], system.cfg, system.task))
    ids = sample["net_input"]["src_tokens"][0]
    assert {"__de__", "[de]"} & {dictionary[i] for i in ids.tolist()}
    assert of_decoder.recover(dictionary, ids) == source
    assert len(list(system.translate([source]))) == 1


def test_a_text_begins_after_the_tag_in_front_and_leaves_tags_as_they_are(
    several: Several, tmp_path: Path
) -> None:
    text = write_lines(
        tmp_path / "text", *(target for _, target in read_pairs(several.data_bin.parent / "rows.tsv"))
    )
    subwords = ["--bpe", "sentencepiece", "--sentencepiece-model", several.data_bin / "spm.model"]
    where = ["-s", "de", "-t", "en", "--path", several.model, "--data", several.data_bin, *subwords]
    call("build text", text, *where, "--output", tmp_path / "store")
    words = ["--datastore", tmp_path / "store", "--text-alpha"]
    alone = several.decode(base=True, scoring=True)
    with patch("fairseq_ccpr.decoding.text_memory.TOKENS", 10**6):  # of a model that is sure of nothing
        found = several.decode(*words, 0.8, scoring=True)
    assert equal(several.decode(*words, 0, scoring=True), alone)
    task, _ = load(configure(several.words(), several.data_bin))
    tags, first, forced = task.tags.ids(task.target_dictionary), [], task.tags.forced
    for number, (one,) in found.items():
        gain = one["positional_scores"] - alone[number][0]["positional_scores"]
        are_tags = torch.tensor([token in tags for token in one["tokens"].tolist()])
        assert bool(are_tags.any()) and float(gain[are_tags].abs().max()) < 1e-5
        first.append(float(gain[forced]))
    assert np.mean(first) > 0.01


def test_what_is_learned_is_what_a_build_has(several: Several, tmp_path: Path) -> None:
    """Tags as in training, none of them a key where decoding forces it; an empty memory is for one pair as well."""
    store = Path(shutil.copytree(several.datastore, tmp_path / "store"))
    rows = list(read_pairs(several.data_bin.parent / "rows.tsv"))
    assert_learned_as_built(store, rows)
    words = several.words("--data", several.data_bin)
    words[words.index("--gen-subset") : words.index("--gen-subset") + 2] = []
    call("build memory", *words, "--output", tmp_path / "empty")
    translator = Translator(datastore=tmp_path / "empty", device="cpu", beam=2, max_len_b=40)
    translator.learn(*rows[0])
    assert [one.text for one in translator.translate([rows[0][0]])] == [rows[0][1]]
    with pytest.raises(DatastoreError, match="are for de-en, and not for en-de"):
        find_parts(str(tmp_path / "empty"), "en-de")


def test_datastores_of_several_pairs_lie_side_by_side(several: Several, tmp_path: Path) -> None:
    """The other direction, and a second target language of the same source; English text stands for French."""
    rows, stores = several.data_bin.parent / "rows.tsv", {("de", "en"): several.datastore}
    for source, target, table in (("en", "de", _swapped(several, tmp_path)), ("de", "fr", rows)):
        folder = tmp_path / f"{source}-{target}"
        languages = ["-s", source, "-t", target]
        call("prepare", "--test", table, *languages, *_pieces(several), "--output", folder / "data")
        words = [
            *languages,
            "--path",
            several.model,
            "--subset",
            "test",
            "--index",
            "exact",
            "--cpu",
            "--quiet",
        ]
        call("build tokens", folder / "data", *words, "--output", folder / "store")
        stores[source, target] = folder / "store"
    other_way = several.words("--datastore", several.datastore, source="en", target="de")
    other_way[other_way.index("--gen-subset") : other_way.index("--gen-subset") + 2] = []
    refused(call("translate", *other_way, check=False), "is for de to en, and not for en to de")
    with pytest.raises(DatastoreError, match="are for de-en, and not for en-de"):
        find_parts(str(several.datastore), "en-de")
    together = ":".join(map(str, stores.values()))
    for (source, target), wanted in stores.items():
        data_bin = several.data_bin if wanted == several.datastore else wanted.parent / "data"
        task, _ = load(
            configure(several.words("--datastore", together, source=source, target=target), data_bin)
        )
        assert task.tags.languages == f"{source}-{target}" and task.token_datastore.directory == wanted


def _swapped(several: Several, folder: Path) -> Path:
    rows = read_pairs(several.data_bin.parent / "rows.tsv")
    return write_lines(folder / "swapped.tsv", *(f"{target}\t{source}" for source, target in rows))


def _pieces(several: Several) -> list[object]:
    return [
        "--sentencepiece-model",
        several.data_bin / "spm.model",
        "--dict",
        several.data_bin / "dict.de.txt",
    ]


def test_bad_input(several: Several) -> None:
    refused(call("translate", "--path", several.model, check=False), "does not say which languages|dict")
    stock = [
        "--path",
        several.model,
        "--task",
        "translation_multi_simple_epoch",
        "-s",
        "de",
        "-t",
        "en",
        "--lang-pairs",
        "de-en",
    ]
    refused(
        call("translate", *stock, "--data", several.data_bin, check=False),
        "does not retrieve: use translation_retrieval_multi",
    )
    wrong = ["-s", "de", "-t", "en", "--data", several.data_bin, "--path", several.model, "--langs", "de,fr"]
    refused(call("translate", *wrong, check=False), "en", "--langs")
    wrong[-1] = "de_DE,deu_Latn,en"
    refused(
        call("translate", *wrong, check=False),
        "--langs has no de, but de_DE, deu_Latn: give -s and -t as the model",
    )
