"""What others build on decoding: a policy, a retriever, threads."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairseq_ccpr import MemoryBatch, Step, Translator
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.mixture import Distribution
from fairseq_ccpr.decoding.options import TokenRetrievalSettings
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.test_set import batches, load
from fairseq_ccpr.evaluation.tune import options_of, silenced
from fairseq_ccpr.inference.resources import parse_generation
from fairseq_ccpr.inference.system import System, encode
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import ROOT, call, equal, held_out_text, output_of, refused, run, token_grid, write_lines
from tests.small_models import World, subword_options

OF_THE_EXAMPLE = ["--user-dir", ROOT / "user_dir", "--task", "translation_agreement"]


def reference_log_probs(decode: Callable, *words: object) -> float:
    """Mean log p of the references' tokens, as decoding scores them."""
    scored = decode(*words, "--score-reference")
    return float(torch.cat([hypotheses[0]["positional_scores"] for hypotheses in scored.values()]).mean())


def test_a_policy_of_ones_own_is_tuned_as_it_decodes(world: World, decode: Callable) -> None:
    alone = ["--knn-likeness", 0, "--no-knn-guard"]  # as the grid has it
    cfg = parse_generation([*world.options("--no-progress-bar", *alone), *map(str, OF_THE_EXAMPLE)])
    task, models = load(cfg)
    ensemble = task.build_ensemble(models)
    text = held_out_text(ensemble, list(batches(cfg, task, models)))
    grid = token_grid(ensemble.memory("tokens"), text, (8,), (5.0,), (False,))
    settings = TokenRetrievalSettings(8, 0.6, 5.0)
    words = ["--knn-k", 8, "--knn-lambda", 0.6, "--knn-temperature", 5, *alone]
    assert grid[settings] == pytest.approx(reference_log_probs(decode, *words, *OF_THE_EXAMPLE), abs=1e-4)
    assert abs(grid[settings] - reference_log_probs(decode, *words)) > 1e-2  # of lambda as it is


@pytest.fixture(scope="module")
def bigrams(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Options of decoding with the example's memory of the training text, beside the tokens."""
    path = tmp_path_factory.mktemp("bigrams") / "text"
    symbols = TokenDatastore(world.datastore).read_symbols()
    values, provenance = TokenDatastore(world.datastore).values, TokenDatastore(world.datastore).provenance
    ends = np.flatnonzero(np.diff(provenance[:, 0])) + 1
    lines = [" ".join(symbols[token] for token in one[:-1]) for one in np.split(np.array(values), ends)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return ["--user-dir", ROOT / "user_dir", "--task", "translation_bigrams", "--bigram-text", path]


def test_a_memory_of_ones_own_decodes_and_scores(
    world: World, decode: Callable, bigrams: list[object], check_rescoring: Callable
) -> None:
    silent = decode(*bigrams, "--beam", 2, "--bigram-lambda", 0)
    assert equal(silent, decode("--beam", 2)) and not equal(decode(*bigrams, "--beam", 2), silent)
    together = decode(*bigrams, "--beam", 2, "--bigram-lambda", 0.4)
    assert equal(
        decode(*bigrams, "--beam", 2, "--bigram-lambda", 0.4, "--batch-size", 3), together, tolerance=3e-3
    )
    check_rescoring(*bigrams, "--bigram-lambda", 0.4)  # position by position, as beam search does


def test_its_votes_are_relative_frequencies(world: World, bigrams: list[object]) -> None:
    cfg = parse_generation([*world.options("--no-progress-bar"), *map(str, bigrams)])
    task, models = load(cfg)
    memory = task.build_ensemble(models).memory("bigrams")
    followers: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for line in Path(bigrams[-1]).read_text(encoding="utf-8").splitlines():  # type: ignore[arg-type]
        ids = [2, 2, *task.target_dictionary.encode_line(line, add_if_not_exist=False).tolist()]
        for one, two, three in zip(ids, ids[1:], ids[2:]):
            followers[one, two][three] += 1
    contexts = [*followers][:200]
    tokens = torch.tensor([[5, *context] for context in contexts])
    vote = memory.vote(Step(tokens, Distribution(torch.zeros(len(tokens), 9))))
    for row, context in enumerate(contexts):
        found = {
            int(v): float(p.exp()) for v, p in zip(vote.values[row], vote.log_probs[row]) if p > float("-inf")
        }
        total = sum(followers[context][token] for token in found)
        assert len(found) == min(16, len(followers[context]))
        assert (
            min(followers[context][token] for token in found)
            >= (sorted(followers[context].values())[::-1] + 16 * [0])[16]
        )
        assert all(
            p == pytest.approx(followers[context][token] / total, abs=1e-6) for token, p in found.items()
        )


def test_it_is_trusted_and_explained(world: World, bigrams: list[object], tmp_path: Path) -> None:
    words = [*world.options("--no-progress-bar"), *map(str, bigrams)]
    shown = call("tune", *words, "--output", tmp_path / "options").stdout
    assert re.search(r"gain +harm +tokens +bigrams$", shown, re.MULTILINE), shown
    trust = ["--trust", tmp_path / "options.trust"]
    page = tmp_path / "page.html"
    call("explain", *words, *trust, "--output", page, "--sentences", 3)
    html = page.read_text(encoding="utf-8")
    assert re.search(r'"memories":\s*\["tokens",\s*"bigrams"\]', html) and "highest p_bigrams" in html
    refused(
        call("compare", *world.options("--no-progress-bar"), *trust, check=False),
        "trust was trained in tokens and bigrams, and --task translation_retrieval has tokens: tune again",
    )


@pytest.fixture(scope="module")
def avoiding(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """Options of decoding with the memory of examples/memory.py, which rules out a frequent word, by what it acts on."""
    code = (
        (ROOT / "examples/memory.py")
        .read_text(encoding="utf-8")
        .partition("\nfor task in")[0]
        .replace("▁him", "▁the")
    )
    folder, made = tmp_path_factory.mktemp("plug-ins"), {}
    for place in ("mixture", "model"):
        name = f"avoiding_{place}"
        (folder / name).mkdir()
        own = (
            code.replace("translation_avoiding", name)
            .replace("AvoidingTask", name)
            .replace('"mixture"', f'"{place}"')
        )
        (folder / name / "__init__.py").write_text(own, encoding="utf-8")
        made[place] = ["--user-dir", folder / name, "--task", name]
    return made


def test_a_memory_that_acts_on_the_mixture_is_scored(
    decode: Callable, avoiding: dict[str, list[object]], check_rescoring: Callable
) -> None:
    words = avoiding["mixture"]
    check_rescoring(*words, "--beam", 2)
    usual, without = decode("--score-reference"), decode(*words, "--score-reference")
    for number, found in without.items():  # references have the word
        scores, ruled_out = found[0]["positional_scores"], found[0]["positional_scores"] == -torch.inf
        assert torch.equal(scores[~ruled_out], usual[number][0]["positional_scores"][~ruled_out])
    assert any(torch.isinf(found[0]["positional_scores"]).any() for found in without.values())


@pytest.mark.parametrize("place", ["mixture", "model"])
def test_it_is_tuned_logged_and_explained(
    world: World, avoiding: dict[str, list[object]], tmp_path: Path, place: str
) -> None:
    words = [*world.options("--no-progress-bar", "--beam", 2), *map(str, avoiding[place])]
    shown = call("tune", *words, "--output", tmp_path / "options").stdout
    assert not re.search(r"\b(nan|inf)\b", shown), shown  # though references have the word
    extra = ["--trust", tmp_path / "options.trust", "--knn-guard"]
    call(
        "explain",
        *words,
        *extra,
        *subword_options(world),
        "--output",
        tmp_path / "page.html",
        "--sentences",
        4,
    )
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "avoided:1" in html and '"memories":["tokens"]' in html
    call("fairseq-generate", *words, *extra, "--knn-log", tmp_path / "log")
    lines = [json.loads(line) for line in (tmp_path / "log").read_text(encoding="utf-8").splitlines()]
    assert lines and all(line["mixed"] < 0 for line in lines)
    # which the datastore may propose again
    assert place == "model" or all(line["token"] != "▁the" for line in lines)


def test_nothing_is_left_of_what_is_silenced(world: World, decode: Callable, bigrams: list[object]) -> None:
    words = [*map(str, bigrams), "--bigram-lambda", "0.9"]
    cfg = parse_generation([*world.options("--no-progress-bar"), *words])
    task, models = load(cfg)
    silent = silenced(task.build_ensemble(models))
    assert equal(decode(*words, *options_of(silent).split(), "--beam", 2), decode("--beam", 2, base=True))
    alone = [word for word in world.options() if word not in ("--datastore", str(world.datastore))]
    at = alone.index("--knn-temperature")
    # has an effect without a datastore
    given = [*alone[1:at], *alone[at + 2 :], *words, "--retrieval-lambda-max", "0"]
    assert System.of(given, world.data_bin).ensemble is not None


def test_a_memory_gets_text_and_tokens_of_the_task(world: World, sentences: list[str]) -> None:
    task = Translator(datastore=world.datastore, device="cpu").task
    assert task.source_text(torch.cat([encode(sentences[0], task), torch.tensor([1, 1])])) == sentences[0]
    ids = task.target_tokens("the land")
    assert (
        task.target_dictionary.string(ids, "sentencepiece") == "the land" and task.target_tokens("世界") == []
    )


def test_a_batch_without_a_vote_says_what_to_define() -> None:
    step = Step(torch.zeros(1, 1, dtype=torch.long), Distribution(torch.zeros(1, 9)))
    with pytest.raises(
        ConfigurationError, match=r"MemoryBatch has no vote: define it, or let .* \(acts_on\)"
    ):
        MemoryBatch().vote(step)


def plug_in(folder: Path, task: str) -> list[object]:
    """Write the example of docs/extending.md that registers a task; the options that use it."""
    page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if f'"{task}"' in block)
    (folder / task).mkdir()
    (folder / task / "__init__.py").write_text(code, encoding="utf-8")
    return ["--user-dir", folder / task, "--task", task]


def test_the_policy_of_the_page_halves_lambda(world: World, decode: Callable, tmp_path: Path) -> None:
    words = plug_in(tmp_path, "translation_cautious")
    assert equal(decode(*words, "--beam", 1, "--knn-lambda", 0.8), decode("--beam", 1, "--knn-lambda", 0.4))


HEAD = """\
from fairseq.tasks import register_task
from fairseq_ccpr import TranslationRetrievalConfig, TranslationRetrievalTask
"""
WIDE = """
@register_task("wide", dataclass=TranslationRetrievalConfig)
class WideTask(TranslationRetrievalTask):
    def token_weight(scores, values, model, settings):
        return scores[:, :1]
"""
SHORT = """
class Short:
    def __init__(self, datastore, device):
        self.datastore = datastore

@register_task("short", dataclass=TranslationRetrievalConfig)
class ShortTask(TranslationRetrievalTask):
    retriever_class = Short
"""


@pytest.mark.parametrize(
    ("name", "code", "sentence"),
    [
        (
            "wide",
            WIDE,
            r"the weight token_weight returned \[\d+, 1\] for neighbours \[\d+, 4\]: return a tensor \[\d+\], a",
        ),
        (
            "short",
            SHORT,
            "the retriever Short has no search and no describe: give it datastore, search and describe",
        ),
    ],
)
def test_what_a_plug_in_lacks_is_named(
    world: World, tmp_path: Path, name: str, code: str, sentence: str
) -> None:
    (tmp_path / f"of_{name}").mkdir()
    (tmp_path / f"of_{name}/__init__.py").write_text(HEAD + code, encoding="utf-8")
    words = [*world.options("--no-progress-bar", "--knn-k", 4, "--beam", 1)]
    refused(
        call("compare", *words, "--user-dir", tmp_path / f"of_{name}", "--task", name, check=False), sentence
    )


def test_the_retriever_of_the_page_decodes_tunes_and_explains(
    world: World, decode: Callable, tmp_path: Path
) -> None:
    plugin = plug_in(tmp_path, "translation_brute_force")
    assert equal(decode(*plugin, "--beam", 1), decode("--beam", 1), tolerance=3e-3)
    words = [*world.options("--no-progress-bar"), *map(str, plugin)]
    assert "retriever:BruteForce|entries:" in call("compare", *words, "--beam", 1).stdout
    call("tune", *words, "--output", tmp_path / "options", "--decode", 1)
    call("explain", *words, "--output", tmp_path / "page.html", "--sentences", 2)
    assert "--knn-k" in (tmp_path / "options").read_text() and (tmp_path / "page.html").stat().st_size > 1000


def test_the_extended_retriever_of_the_page_finds_four(
    world: World, decode: Callable, tmp_path: Path
) -> None:
    page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    (code,) = (
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Nearest" in block
    )
    task = '\n@register_task("nearest", dataclass=TranslationRetrievalConfig)\nclass NearestTask(TranslationRetrievalTask):\n'
    (tmp_path / "nearest").mkdir()
    (tmp_path / "nearest/__init__.py").write_text(
        HEAD + code + task + "    retriever_class = Nearest\n", encoding="utf-8"
    )
    common = ["--beam", 1, "--knn-lambda", 0.6, "--knn-likeness", 0]
    words = ["--user-dir", tmp_path / "nearest", "--task", "nearest", *common]
    assert equal(decode(*words, "--knn-k", 16), decode(*common, "--knn-k", 4))


def test_threads_that_share_an_ensemble_do_not_mix_their_sentences(world: World, joint: list[object]) -> None:
    words = ["--no-progress-bar", "--batch-size", 4, "--beam", 3, "--max-len-b", 15, *joint]
    cfg = parse_generation(world.options(*words))
    task, models = load(cfg)
    ensemble = task.build_generator(models, cfg.generation).model
    samples = list(batches(cfg, task, models))

    def translate(part: list[dict[str, Any]]) -> list[list[int]]:
        """With a generator of its own, over the same models and memories."""
        generator = task.build_base_generator(models, cfg.generation)
        generator.model = ensemble
        hypotheses = [task.inference_step(generator, models, sample) for sample in part]
        return [one[0]["tokens"].tolist() for batch in hypotheses for one in batch]

    parts = [samples[0::2], samples[1::2]]
    alone = [translate(part) for part in parts]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            assert list(pool.map(translate, parts)) == alone


def test_a_folder_imports_this_plugin_and_another(world: World, tmp_path: Path) -> None:
    """As docs/models.md has it: a model whose architecture comes with another --user-dir, in a command and in fairseq's."""
    for name, lines in {
        "model_configs": (
            "from fairseq.models import register_model_architecture",
            "from fairseq.models.transformer import base_architecture",
            "register_model_architecture('transformer', 'transformer_of_theirs')(base_architecture)",
        ),
        "both": ("import fairseq_ccpr", "import model_configs"),
    }.items():
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "__init__.py", *lines)
    state = torch.load(world.model)
    vars(state["cfg"]["model"]).update(_name="transformer_of_theirs", arch="transformer_of_theirs")
    torch.save(state, tmp_path / "model.pt")
    words = [*world.options("--beam", 2)[1:], "--path", tmp_path / "model.pt"]
    at = words.index("--user-dir")
    words = [*words[:at], *words[at + 2 :], "--user-dir", tmp_path / "both"]
    path = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    generated = output_of(
        run("fairseq-generate", world.data_bin, *words, *subword_options(world), **path), "D"
    )
    rows = list(read_pairs(world.folder / "test.tsv"))[:3]
    source = write_lines(tmp_path / "in.txt", *(source for source, _ in rows))
    given = ["--data", world.data_bin, *subword_options(world), "--input", source]
    written = run("fairseq-ccpr translate", *words, *given, **path).stdout.splitlines()
    assert written == [generated[number].split("\t", 1)[1] for number in range(3)]
    usual = Translator(datastore=world.datastore, device="cpu", beam=2, max_len_b=25, knn_temperature=5)
    assert written == [one.text for one in usual.translate(source for source, _ in rows)]
