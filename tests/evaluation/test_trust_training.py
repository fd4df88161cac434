"""Learning trust: what the loss is, that training helps and does no harm, what it costs, and what is remembered."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fairseq.sequence_scorer import SequenceScorer
from safetensors import safe_open

from fairseq_ccpr import Translator
from fairseq_ccpr.datastore.tuned import TUNED, write_tuned
from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble, RetrievalScorer
from fairseq_ccpr.decoding.mixture import Mixture
from fairseq_ccpr.decoding.phrase_memory import CONSENT, PhraseMemory
from fairseq_ccpr.decoding.token_memory import trusted_neighbours
from fairseq_ccpr.decoding.trust import LearnedTrust, Trust
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.evaluation.fit import split
from fairseq_ccpr.evaluation.grids import force_decode_text, loss_of
from fairseq_ccpr.evaluation.test_set import (
    Decodings,
    OtherText,
    SystemOutput,
    TranslationScores,
    batches,
    decode,
    other_texts,
)
from fairseq_ccpr.evaluation.training import WeighedText, train_trust, worths
from fairseq_ccpr.evaluation.tune import BATCHES, REFERENCES, SAMPLED, Candidate, silenced, tune
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.text.pairs import read_pairs
from tests.decoding.phrase_ensembles import load_ensemble
from tests.decoding.test_trust import parts_of
from tests.helpers import BOTH, ROOT, TOKENS, adaptive_trust, call, refused
from tests.small_models import World

SEED = 20261123
COMMON = ("--cpu", "--no-progress-bar", "--max-len-b", 30)


def random_rows(count: int, inputs: int, memories: int = 1, k: int = 0) -> WeighedText:
    torch.manual_seed(SEED)
    print("seed", SEED)
    weights = torch.rand(count, memories) / memories
    retrieved = (
        torch.rand(count, memories).log().masked_fill(torch.rand(count, memories) < 0.3, float("-inf"))
    )
    columns = torch.randn(count, inputs), weights, torch.rand(count).log(), retrieved
    return WeighedText(
        "noise", False, Mixture(), torch.arange(count) // 8, *columns, torch.rand(count, k) < 0.3
    )


class Likelihood(torch.nn.Module):
    """The likelihood of some rows as a function of trust's parameters."""

    def __init__(self, trust: Trust, rows: WeighedText) -> None:
        super().__init__()
        self.trust, self.rows = trust, rows

    def forward(self) -> torch.Tensor:
        return self.rows.log_likelihood(self.trust).mean()


def test_the_gradient_of_the_likelihood_is_right_in_float64() -> None:
    trust = LearnedTrust(BOTH, hidden=3).double()
    rows = random_rows(6, len(trust.gate.names), memories=2)
    doubled = {name: getattr(rows, name).double() for name in ("inputs", "weights", "model", "retrieved")}
    likelihood = Likelihood(trust, rows._replace(**doubled))
    names = [name for name, _ in likelihood.named_parameters()]
    values = [(torch.randn_like(one) * 0.3).requires_grad_() for one in likelihood.parameters()]

    def loss(*given: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.func.functional_call(likelihood, dict(zip(names, given)), ())
        return result

    assert torch.autograd.gradcheck(loss, values)


@pytest.mark.parametrize("kind", [LearnedTrust, adaptive_trust()])
def test_training_is_never_worse_than_its_start_on_sentences_held_out(kind: type[Trust]) -> None:
    trust = LearnedTrust(TOKENS) if kind is LearnedTrust else kind(TOKENS, neighbours=4, temperature=0.1)  # type: ignore[call-arg]
    inputs = len(trust.gate.names) if isinstance(trust, LearnedTrust) else 12
    text = random_rows(400, inputs, k=4)
    (trained,), (held_out,) = split([text], "trust")
    trust.prepare(trained.inputs)
    start = float(held_out.log_likelihood(trust).mean().detach())
    assert float(held_out.log_likelihood(train_trust(trust, [text])).mean().detach()) >= start - 1e-6


def domain_text(name: str, foreign: bool, count: int = 3000) -> WeighedText:
    """A text whose neighbours are right at home and wrong abroad; one feature of many tells where it is."""
    generator = torch.Generator().manual_seed(SEED + foreign)
    inputs = torch.randn(count, len(LearnedTrust(TOKENS).gate.names), generator=generator)
    inputs[:, 5] += -3 if foreign else 3
    right = torch.rand(count, 1, generator=generator) < (0.02 if foreign else 0.98)
    retrieved = torch.where(right, torch.tensor(0.9), torch.tensor(1e-9)).log()
    model = torch.full((count,), 0.5).log()
    columns = inputs, torch.full((count, 1), 0.5), model, retrieved, torch.zeros(count, 0).bool()
    return WeighedText(name, foreign, Mixture(), torch.arange(count) // 10, *columns)


def test_a_text_of_one_sentence_is_refused() -> None:
    texts = [domain_text("home", False), domain_text("abroad", True, count=10)]
    with pytest.raises(
        ConfigurationError, match="abroad has too few sentences to learn trust from: give at least 6 pairs"
    ):
        train_trust(LearnedTrust(TOKENS), texts)


def test_what_is_trained_depends_on_the_seed_alone() -> None:
    texts = [domain_text("home", False, count=12000), domain_text("abroad", True)]
    begun = LearnedTrust(TOKENS).state_dict()

    def trained(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        trust = LearnedTrust(TOKENS)
        trust.load_state_dict(begun)
        return torch.cat([weight.flatten() for weight in train_trust(trust, texts).parameters()])

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(2))


def test_trust_tells_home_from_abroad() -> None:
    texts = [domain_text("home", False), domain_text("abroad", True)]
    torch.manual_seed(SEED)
    trust = train_trust(LearnedTrust(TOKENS), texts)
    (home, trusted_home), (abroad, trusted_abroad) = (worths(trust, text).values() for text in texts)
    assert trusted_home.weights["tokens"] > 0.75 and trusted_abroad.weights["tokens"] < 0.1
    assert home.weights == abroad.weights == {"tokens": 0.5}
    assert trusted_home.gain > home.gain and trusted_abroad.gain > -0.02 > abroad.gain
    assert trusted_abroad.harm < 0.02 < 0.3 < abroad.harm


@pytest.fixture(scope="module")
def wrong_domain(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A datastore and held-out pairs of a domain of litanies, all of which are translated the same way."""
    folder = tmp_path_factory.mktemp("wrong")
    for name in ("train", "valid"):
        lines = [
            f"{'und der Herr, ' * (number % 5 + 1)}\tthe of and to in that he\n" for number in range(300)
        ]
        (folder / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")
    words = [
        "-s",
        "de",
        "-t",
        "en",
        "--sentencepiece-model",
        world.spm,
        "--dict",
        world.data_bin / "dict.en.txt",
    ]
    subsets = [word for name in ("train", "valid") for word in (f"--{name}", folder / f"{name}.tsv")]
    call("prepare", *subsets, *words, "--output", folder / "data")
    store = ["--path", world.model, "--output", folder / "store", "--cpu", "--quiet"]
    call("build tokens", folder / "data", *store)
    return folder / "data", folder / "store"


def worths_in(shown: str) -> dict[str, dict[str, list[str]]]:
    """The table of what systems are worth: by text and system, the cells that are filled."""
    found: dict[str, dict[str, list[str]]] = {}
    lines = shown[shown.index("nats per token") :].splitlines()
    assert lines[0].split()[4:6] == ["gain", "harm"] and set(lines[0].split()[6:]) <= {"tokens", "phrases"}
    name = ""
    for line in lines[1:]:
        if not re.fullmatch(r".{24}\S.{17} +[-+]?\d+\.\d{3}.*", line):
            break
        name = line[:24].strip() or name
        found.setdefault(name, {})[line[24:42].strip()] = line[42:].split()
    return found


def gains_in(shown: str) -> dict[str, tuple[float, float]]:
    """What the settings and trust gain on each text."""
    texts = worths_in(shown)
    return {
        name: tuple(float(rows[one][0]) for one in ("without trust", "with trust"))
        for name, rows in texts.items()
    }


@pytest.mark.full
def test_a_datastore_of_the_wrong_domain_does_no_harm_with_trust(
    world: World, wrong_domain: tuple[Path, Path], tmp_path: Path
) -> None:
    data, store = wrong_domain
    also = f"{world.data_bin}:test"
    shown = call(
        "tune", data, "--datastore", store, "--also", also, *COMMON, "--output", tmp_path / "options"
    ).stdout
    gains = gains_in(shown)
    (settings, trust), (_, at_home) = gains[also[-23:].strip()], gains["valid"]
    assert settings < -0.3 and trust > -0.05 and at_home > 0.5, shown
    for systems in worths_in(shown).values():
        assert list(systems) == ["model alone", "lambda", "without trust", "with trust"]
        for gain, harm, weight in list(systems.values())[1:]:  # of tokens alone
            assert float(harm) >= max(0, -float(gain)) and 0 <= float(weight) <= 1
    # The same abroad, in translations: those of the model alone, more or less
    system = ["compare", world.data_bin, "--datastore", store, *COMMON, "--bpe", "sentencepiece"]
    system += ["--sentencepiece-model", world.spm, "--path", world.model]
    chosen = (tmp_path / "options").read_text().split()
    bleu = [table(call(*system, *words).stdout) for words in (chosen, [*chosen, "--trust", "none"])]
    assert (
        bleu[0]["retrieval"] > bleu[1]["retrieval"] and abs(bleu[0]["retrieval"] - bleu[0]["base"]) < 1.0
    ), bleu


def table(shown: str) -> dict[str, float]:
    return {
        name: float(bleu)
        for name, bleu in re.findall(r"^\| (base|retrieval) \| (\S+) \|", shown, re.MULTILINE)
    }


@contextmanager
def counting_steps() -> Iterator[Counter[str]]:
    """Count what models compute: hypotheses times steps of decoding, and tokens of teacher-forced passes."""
    counted: Counter[str] = Counter()
    step, force = RetrievalEnsemble.step, RetrievalEnsemble.force_models

    def stepping(self: Any, tokens: torch.Tensor, *others: Any) -> Any:
        counted["decoded"] += len(tokens)
        return step(self, tokens, *others)

    def forcing(self: Any, sample: dict[str, Any], *others: Any) -> Any:
        counted["forced"] += sample["target"].numel()
        return force(self, sample, *others)

    with (
        patch.object(RetrievalEnsemble, "step", stepping),
        patch.object(RetrievalEnsemble, "force_models", forcing),
    ):
        yield counted


@pytest.mark.full
@pytest.mark.parametrize(("memories", "counts"), [("token", (5, 4)), ("phrase", (7, 5)), ("both", (8, 6))])
def test_what_tuning_computes_is_a_few_plain_decodings(
    world: World, joint: list[object], phrases: list[object], memories: str, counts: tuple[int, int]
) -> None:
    """What it decodes and force-decodes, another text as large as the held-out one included."""
    memory = {"token": [], "phrase": phrases, "both": joint}[memories]
    words = world.options("--no-progress-bar", "--gen-subset", "valid", "--untuned", "--max-len-b", 45)[1:]
    system = System.of([*words, *map(str, memory)], world.data_bin)
    cfg, task = system.cfg, system.task
    task.load_dataset("valid")
    with counting_steps() as plain:
        generators = {"base": system.generator(retrieve=False)}
        decode(
            cfg, task, system.models, generators, list(batches(cfg, task, system.models, at_least=BATCHES))
        )
    with counting_steps() as counted:
        tuned = tune(system, [OtherText(world.data_bin, "test")], "learned", 1)
    assert plain["decoded"] and not plain["forced"]
    tried, finalists = (len(one.scores) for one in (tuned.screened, tuned.trial))
    # Which variants are worth trying, scores decide, which round otherwise on other processors.
    assert all(2 < one <= most for one, most in zip((tried, finalists), counts))
    # Hypotheses end at other steps, by far in so small a model
    thirds = (tried + (SAMPLED - 1) * finalists) / SAMPLED
    assert 0.6 * thirds < counted["decoded"] / plain["decoded"] < 1.4 * thirds
    assert 0 < counted["forced"] < 0.75 * plain["decoded"], (counted, plain)
    assert tuned.best.ensemble.trust is not None or not tuned.helps


def test_many_other_texts_cost_what_one_costs(world: World) -> None:
    words = world.options("--no-progress-bar", "--gen-subset", "test", "--untuned", "--batch-size", 2)[1:]
    system = System.of(words, world.data_bin)
    samples = OtherText(world.data_bin, "test").samples(system)
    size = sum(int(one["ntokens"]) for one in samples)
    assert system.ensemble is not None
    half = force_decode_text("half", samples, system.ensemble, size // 2)
    assert 0.3 * size < len(half.targets) < 0.7 * size


def test_phrases_begin_with_what_tuning_left_for_the_tokens(both: Path, tmp_path: Path) -> None:
    joint_parts = parts_of(shutil.copytree(both, tmp_path / "both"))
    tokens = {"token": joint_parts["token"]}
    assert trusted_neighbours(tokens) == (8, 32) and trusted_neighbours(joint_parts) == (32,)
    write_tuned(tokens, {"tokens": {"k": 16, "lambda_": 0.5}}, "signature")
    assert trusted_neighbours(joint_parts) == (16,) and trusted_neighbours(tokens) == (8, 32)


@pytest.fixture(scope="module")
def tuned_alone(
    wrong_domain: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """What tuning on a small text says, and the options it writes."""
    data, store = wrong_domain
    path = tmp_path_factory.mktemp("alone") / "options"
    return call("tune", data, "--datastore", store, *COMMON, "--output", path).stdout, path


def hidden_units(trust: Path) -> int:
    with safe_open(trust, framework="pt") as stream:
        return int(json.loads(stream.metadata()["trust"])["arguments"]["hidden"])


SMALL = "valid is small: trust is a linear function of its features"


def test_trust_is_linear_where_text_is_small(tuned_alone: tuple[str, Path]) -> None:
    shown, options = tuned_alone
    assert SMALL in shown and hidden_units(Path(f"{options}.trust")) == 0


def test_the_held_out_text_is_no_text_of_another_domain(
    wrong_domain: tuple[Path, Path],
    tuned_alone: tuple[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    data, store = wrong_domain
    words = ["--datastore", store, *COMMON, "--output", tmp_path / "options"]
    shown = call("tune", data, *words, "--also", data, f"{data / '..' / data.name}:valid").stdout
    assert caplog.text.count("is what is tuned on: it counts once") == 2
    signatures = [
        re.findall(r"^retrieval .* (trust:learned-\w+) precision:fp32$", one, re.MULTILINE)
        for one in (shown, tuned_alone[0])
    ]
    assert signatures[0] == signatures[1] != [] and worths_in(shown) == worths_in(tuned_alone[0])


def test_texts_that_are_named_twice_count_once(tmp_path: Path) -> None:
    home, other = tmp_path / "home", str(tmp_path / "other")
    found = other_texts(
        [str(home), other, f"{other}:valid", f"{other}:test", f"{home}:test"], OtherText(home, "valid")
    )
    assert [(one.data_bin.name, one.subset) for one in found] == [
        ("other", "valid"), ("other", "test"), ("home", "test"),
    ]  # fmt: skip


@pytest.mark.full
def test_trust_of_ones_own_is_learned_and_decodes(
    world: World, wrong_domain: tuple[Path, Path], tmp_path: Path
) -> None:
    """The network of Adaptive kNN-MT, the worked example of a user dir."""
    data, store = wrong_domain
    words = ["--datastore", store, *COMMON, "--user-dir", ROOT / "user_dir", "--task", "translation_adaptive"]
    shown = call("tune", data, *words, "--output", tmp_path / "options").stdout
    assert "trust:adaptive-" in shown and gains_in(shown)["valid"][1] > 0.5
    chosen = (tmp_path / "options").read_text().split()
    refused(
        call("translate", "--datastore", store, *chosen, check=False),
        "is trust of the kind adaptive, and --task",
    )
    assert (
        "retrieval"
        in call("compare", data, *words, "--gen-subset", "valid", "--path", world.model, *chosen).stdout
    )


@pytest.mark.full
def test_phrases_are_trusted_alone_and_beside_tokens(
    world: World, joint: list, phrases: list, tmp_path: Path
) -> None:
    for name, words in (("phrase", phrases), ("both", joint)):
        options = [*world.options("--no-progress-bar"), *map(str, words)]
        shown = call("tune", *options, "--output", tmp_path / name, "--also", f"{world.data_bin}:test").stdout
        systems = worths_in(shown)["valid"]
        of_tokens = ["lambda"] if name == "both" else []
        assert list(systems) == [
            "model alone",
            *of_tokens,
            "lambda of phrases",
            "without trust",
            "with trust",
        ]
        # Gain, harm, and a weight for each memory
        memories = 2 if name == "both" else 1
        left_out = "phrases bring nothing here" in shown
        assert len(systems["lambda of phrases"]) == 2 + memories
        assert len(systems["with trust"]) == 2 + memories - left_out
        assert len(systems.get("lambda", "...")) == 3
        assert f"{name}.trust" in (tmp_path / name).read_text() or "nothing is better" in shown
        chosen = (tmp_path / name).read_text().split()
        assert "Generate test" in call("fairseq-generate", *options, *chosen).stdout


@pytest.mark.parametrize("helps", [True, False])
def test_phrases_that_translate_worse_are_left_out(
    world: World, joint: list, tmp_path: Path, helps: bool
) -> None:
    """Whatever their likelihood: what is kept then decodes as if there were none."""

    def scored(trial: Any, tried: list[Candidate], *others: Any) -> Any:
        bleu = {one.name: 1.0 + (one.ensemble.find(PhraseMemory) is None) for one in tried} | {
            "base": 0.5 if helps else 3.0
        }
        scores = {n: TranslationScores(value, value, "", "") for n, value in bleu.items()}
        return scores, dict.fromkeys(bleu, 1.0), Decodings(dict.fromkeys(bleu, SystemOutput()))

    options = world.options("--no-progress-bar")
    chosen = tmp_path / "options"
    with patch("fairseq_ccpr.evaluation.tune.Trial._decode", scored):
        shown = call("tune", *options, *map(str, joint), "--output", chosen).stdout
    assert ("phrases bring nothing here" in shown) == helps and (
        "better than the model alone" in shown
    ) != helps
    words = chosen.read_text().split()
    assert words[words.index("--phrases-lambda") + 1] == "0" and ("--trust" in words) == helps
    decoded = call("fairseq-generate", *options, *map(str, joint), *words)
    assert " phrases:" not in decoded.stdout + decoded.stderr


@pytest.mark.parametrize(
    ("loss", "given", "kept"),
    [
        (-0.1, [], "3"),
        (0.1, [], "12"),
        (0.1, ["--prefer", "faithful"], "3"),
        (2.5, ["--prefer", "faithful"], "12"),  # more than half of the gain
        (-0.1, ["--phrases-consent", 2], "2"),
        (-0.1, ["--phrases-consent", 12], "12"),
    ],
)
def test_votes_are_bounded_where_translations_are_better_or_more_faithful(
    world: World, phrases: list, tmp_path: Path, loss: float, given: list, kept: str
) -> None:
    shares = {"base": 0.0, REFERENCES: 0.1}

    def scored(trial: Any, tried: list[Candidate], *others: Any) -> Any:
        bounds = {one.name: one.ensemble.find(PhraseMemory).settings.consent == CONSENT for one in tried}
        bleu = {name: 5.0 - loss * bound for name, bound in bounds.items()} | {"base": 1.0}
        scores = {n: TranslationScores(value, value, "", "") for n, value in bleu.items()}
        shares.update({name: 0.2 if bound else 0.4 for name, bound in bounds.items()})
        return scores, dict.fromkeys(bleu, 1.0), Decodings(dict.fromkeys(bleu, SystemOutput()))

    chosen = tmp_path / "options"
    with (
        patch("fairseq_ccpr.evaluation.tune.Trial._decode", scored),
        patch(
            "fairseq_ccpr.evaluation.tune.copied", lambda systems, text: {one: shares[one] for one in systems}
        ),
    ):
        words = [*world.options("--no-progress-bar"), *map(str, phrases), *given, "--output", chosen]
        shown = call("tune", *words).stdout
    words = chosen.read_text().split()
    assert words[words.index("--phrases-consent") + 1] == kept
    price = re.search(
        r"^chosen by --prefer \w+: .*, which (.*) than the best \((.*) BLEU", shown, re.MULTILINE
    )
    faithful = loss == 0.1 and kept == "3"
    assert (price is not None) == faithful and (price is None or price.groups() == ("copies less", "+0.10"))


def test_all_is_translated_with_the_finalists_and_what_each_costs_is_printed(
    world: World, phrases: list, tmp_path: Path
) -> None:
    words = [*world.options("--no-progress-bar"), *map(str, phrases), "--also", f"{world.data_bin}:test"]
    shown = call("tune", *words, "--output", tmp_path / "options").stdout
    (third,) = re.findall(r"^a third of valid, (\d+) sentences", shown, re.MULTILINE)
    (whole,) = re.findall(r"^all of valid, (\d+) sentences", shown, re.MULTILINE)
    assert 0 < int(third) < int(whole) == len(list(read_pairs(world.folder / "valid.tsv")))
    _, header, *rows = shown[
        shown.index("all of valid") : shown.index("copied: of the subwords")
    ].splitlines()
    assert header.split() == ["BLEU", "chrF", "copied", "other", "text", "tokens/s"]
    table = {one[5] if len(one) > 5 else one[1]: one for one in (row.split(None, 5) for row in rows)}
    assert table.pop(REFERENCES)[0].endswith("%") and table["base"][3] == "0.000"
    assert "-0.000" not in shown and re.search(
        r"^other text: what references of \d+ sentences that trained nothing", shown, re.MULTILINE
    )
    assert "; so little text says little" in shown
    assert len({float(one[0]) for one in table.values()}) > 1
    (alone,) = (name for name in table if name.endswith(" without --also"))
    bounds = {word for name in table for word in re.findall(r"--phrases-consent (\d+)", name)}
    assert alone.removesuffix(" without --also") in table and bounds == {"3", "12"}


def test_losses_on_other_text_are_those_of_scored_references(world: World, joint: list) -> None:
    cfg, task, models, ensemble = load_ensemble(world, joint)
    samples, dictionary = list(batches(cfg, task, models)), task.target_dictionary
    means = []
    for scorer in (SequenceScorer(dictionary), RetrievalScorer(ensemble, dictionary)):
        scored = [scorer.generate(models, sample) for sample in samples]
        means.append(
            float(torch.cat([one["positional_scores"] for some in scored for one, *_ in some]).mean())
        )
    assert means[0] != means[1] and loss_of(ensemble, samples) == pytest.approx(means[0] - means[1], abs=1e-5)
    assert loss_of(silenced(ensemble), samples) == pytest.approx(0, abs=1e-6)


def test_sentences_may_be_translated_in_two_parts(world: World) -> None:
    system = System.of(world.options("--no-progress-bar", "--gen-subset", "test")[1:], world.data_bin)
    cfg, task, models = system.cfg, system.task, system.models
    task.load_dataset("test")
    samples, generators = list(batches(cfg, task, models, at_least=4)), {"base": system.generator()}
    whole, first, second = (
        decode(cfg, task, models, generators, some) for some in (samples, samples[:1], samples[1:])
    )
    joined = second.after(first)
    assert joined.scores("base") == whole.scores("base") != second.scores("base")
    assert joined.systems["base"].ids.keys() == joined.reference_ids.keys() == whole.reference_ids.keys()
    assert joined.systems["base"].seconds == second.systems["base"].seconds


def test_phrases_that_are_left_out_by_hand_stay_out(world: World, joint: list, tmp_path: Path) -> None:
    options, chosen = world.options("--no-progress-bar"), tmp_path / "options"
    call("tune", *options, *map(str, joint), "--phrases-lambda", 0, "--output", chosen)
    words = chosen.read_text().split()
    assert words[words.index("--phrases-lambda") + 1] == "0"
    decoded = call("fairseq-generate", *options, *map(str, joint), *words)
    assert " phrases:" not in decoded.stdout + decoded.stderr


def test_what_was_tuned_is_used_without_being_named(
    world: World, wrong_domain: tuple[Path, Path], tmp_path: Path
) -> None:
    data, store = wrong_domain
    call("tune", data, "--datastore", store, "--also", world.data_bin, *COMMON)
    sentences = [source for source, _ in read_pairs(world.folder / "test.tsv")][:4]
    trusting = Translator(datastore=store, device="cpu", max_len_b=30)
    assert "trust:learned-" in (trusting.signature or "")
    without = Translator(datastore=store, device="cpu", max_len_b=30, trust="none")
    assert "trust:" not in (without.signature or "")
    assert [one.text for one in trusting.translate(sentences)] != [
        one.text for one in without.translate(sentences)
    ]
    assert "trust:" not in (Translator(datastore=store, device="cpu", untuned=True).signature or "")
    assert "trust:learned-" in call("inspect", store).stdout
    page = tmp_path / "page.html"
    trusting.explain(sentences[0]).save(page)
    assert '"trust_saw": [{' in page.read_text(encoding="utf-8").replace('"trust_saw":[{', '"trust_saw": [{')
    file = store / "trust-token.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(DatastoreError, match="not what tuning left: tune again"):
        Translator(datastore=store, device="cpu")
    assert (store / TUNED).exists()


def test_bad_input_is_refused_in_one_sentence(
    world: World, wrong_domain: tuple[Path, Path], tmp_path: Path
) -> None:
    data, store = wrong_domain

    def tuned(*words: object) -> object:
        return call(
            "tune", data, "--datastore", store, *COMMON, "--output", tmp_path / "x", *words, check=False
        )

    refused(tuned("--also", tmp_path / "nowhere"), "there is no folder .*nowhere")
    refused(tuned("--also", f"{world.data_bin}:train9"), "has no subset train9: name another")
    other = tmp_path / "other"
    other.mkdir()
    for path in data.glob("*.*"):
        (other / path.name).write_bytes(path.read_bytes())
    lines = (other / "dict.en.txt").read_text(encoding="utf-8").splitlines()
    (other / "dict.en.txt").write_text("\n".join(lines[1:]) + "\n", encoding="utf-8")
    refused(tuned("--also", other), "has another dictionary for en than the model")
    refused(tuned("--also", world.data_bin, "--combiner", "fixed"), "--also is for what is learned")
    refused(tuned("--trust", tmp_path / "t"), "tuning learns it|is missing")
    refused(tuned("--combiner", "fix"), "fixed")
    refused(tuned("--replace-unk"), "--replace-unk copies unknown characters .*leave it out")
    refused(tuned("--prefer", "faithful"), "neither a text nor phrases of one.*leave out --prefer faithful")
    refused(
        tuned("--gen-subset", "train"), "--gen-subset is for decoding: name the held-out pairs with --subset"
    )
    assert not (tmp_path / "x").exists()
