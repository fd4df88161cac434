"""A real, tiny translation model and what is made from it, once a test session."""

from __future__ import annotations

import io
import itertools
import os
import shutil
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import sentencepiece
import torch
from fairseq import checkpoint_utils, options, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models.roberta import RobertaModel
from fairseq_cli import generate
from fairseq_cli import train as train_cli

from fairseq_ccpr.cli import (
    benchmark,
    benchmark_phrases,
    build_datastore,
    build_lexicon_dataset,
    compare_decoding,
    compare_systems,
    convert_encoder,
    evaluate_alignments,
    evaluate_mining,
    evaluate_phrases,
    evaluate_retrieval,
    evaluate_retrieved_phrases,
    explain_translation,
    extract_phrases,
    inspect_datastore,
    merge_datastores,
    mine_bitext,
    prepare_data,
    report,
    retrieve_phrases,
    run_experiment,
    tune_retrieval,
)
from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.evaluation.translation.test_set import load
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder
from fairseq_ccpr.phrases.pair_store import PhrasePairs
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.text.sentencepiece_tokenizer import SentencePieceTokenizer
from fairseq_ccpr.text.subwords import SubwordTokenizer

torch.set_num_threads(1)  # as in the processes the tests start: results are compared to the bit
ROOT = Path(__file__).resolve().parent.parent
USER_DIR = ROOT / "fairseq_ccpr"
DEMO = ROOT / "datastores" / "demo"
PAIRS = {"train": 1200, "valid": 40, "test": 40}
TINY = "--encoder-layers 1 --decoder-layers 2 --encoder-embed-dim 32 --encoder-ffn-embed-dim 64 "
TINY += "--encoder-attention-heads 2 --decoder-attention-heads 2 --share-all-embeddings --dropout 0 "
TINY += "--optimizer adam --lr 5e-3 --criterion cross_entropy --no-epoch-checkpoints --no-progress-bar"


def run(*command: object, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command of this project or of fairseq as a user would, on one thread, from the checkout."""
    words = [str(word) for word in command]
    if words[0].endswith(".py"):
        words = [sys.executable, *words]
    elif not words[0].startswith("/"):
        words[0] = str(Path(sys.executable).parent / words[0])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **environment}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done


def run_two_processes(*command: object) -> list[str]:
    """Run fairseq-train in two processes on this CPU, as fairseq's own options for it have it; what each one logged."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    together = ["--distributed-world-size", 2, "--distributed-init-method", f"tcp://localhost:{port}"]
    together += ["--distributed-no-spawn", "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp"]
    with ThreadPoolExecutor() as pool:
        done = [pool.submit(run, *command, *together, "--distributed-rank", rank) for rank in range(2)]
        return [process.result().stdout + process.result().stderr for process in done]


MAINS = {
    "build_datastore": build_datastore.main,
    "build_lexicon_dataset": build_lexicon_dataset.main,
    "inspect_datastore": inspect_datastore.main,
    "merge_datastores": merge_datastores.main,
    "compare_decoding": compare_decoding.main,
    "tune_retrieval": tune_retrieval.main,
    "evaluate_retrieval": evaluate_retrieval.main,
    "evaluate_phrases": evaluate_phrases.main,
    "evaluate_retrieved_phrases": evaluate_retrieved_phrases.main,
    "benchmark": benchmark.main,
    "benchmark_phrases": benchmark_phrases.main,
    "compare_systems": compare_systems.main,
    "explain_translation": explain_translation.main,
    "extract_phrases": extract_phrases.main,
    "evaluate_alignments": evaluate_alignments.main,
    "convert_encoder": convert_encoder.main,
    "prepare_data": prepare_data.main,
    "mine_bitext": mine_bitext.main,
    "evaluate_mining": evaluate_mining.main,
    "report": report.main,
    "retrieve_phrases": retrieve_phrases.main,
    "run_experiment": run_experiment.main,
    "fairseq-generate": generate.cli_main,
    "fairseq-train": train_cli.cli_main,
}


def call(command: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which spares it the imports; what it prints and its exit code are the same."""
    out, err = io.StringIO(), io.StringIO()
    words = [command, *(str(word) for word in arguments)]
    vars(checkpoint_utils.save_checkpoint).pop(
        "best", None
    )  # fairseq keeps the best score of a training in its process
    code = 0
    with patch.object(sys, "argv", words), redirect_stdout(out), redirect_stderr(err):
        try:
            MAINS[command]()
        except SystemExit as end:
            code = int(end.code or 0)
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)  # what the interpreter does in the end
            code = 1
    done = subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())
    if check and code:
        raise AssertionError(f"{words}\n{done.stdout}\n{done.stderr}")
    return done


@dataclass
class World:
    """What the tests work with."""

    folder: Path
    data_bin: Path
    spm: Path
    model: Path
    other_model: Path  # same dictionary, other weights
    datastore: Path  # of `model`, exact search

    def options(self, *extra: object) -> list[str]:
        """Options of fairseq-generate for this model and datastore."""
        words = [self.data_bin, "--user-dir", USER_DIR, "--task", "translation_retrieval", "-s", "de", "-t", "en"]
        words += ["--path", self.model, "--datastore", self.datastore, "--cpu", "--knn-temperature", 5]
        words += ["--max-len-b", 45, *extra]
        return [str(word) for word in words]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    tables: list[object] = []
    for subset, count in PAIRS.items():
        short = (pair for pair in read_pairs(DEMO / f"bible.{subset}.tsv.xz") if len(pair[1]) < 80)
        rows = "".join(f"{source}\t{target}\n" for source, target in itertools.islice(short, count))
        (folder / f"{subset}.tsv").write_text(rows, encoding="utf-8")
        tables += [f"--{subset}", folder / f"{subset}.tsv"]
    data_bin = folder / "data-bin"
    call("prepare_data", *tables, "-s", "de", "-t", "en", "--pieces", 500, "--output", data_bin)
    train(data_bin, folder / "model", 150, seed=1)
    train(data_bin, folder / "other", 10, seed=2)
    made = World(
        folder, data_bin, data_bin / "spm.model", folder / "model/checkpoint_last.pt",
        folder / "other/checkpoint_last.pt", folder / "datastore",
    )  # fmt: skip
    build(made, made.datastore)
    return made


@dataclass
class Ccpr:
    """A tiny phrase encoder that was trained on a few verses, and what it was made from."""

    pairs: Path  # TSV of all verses
    context: Path  # the encoder directory that training started from
    phrases: Path  # with train and valid
    checkpoint: Path
    log: str  # of fairseq-train

    def training(self, save_dir: Path, updates: int, *extra: object) -> list[object]:
        """The command line of fairseq-train."""
        words = f"--user-dir {USER_DIR} --task phrase_contrast --arch phrase_encoder --criterion ccpr --cpu "
        words += (
            "--optimizer adam --lr 5e-3 --batch-size 24 --max-subwords 100 --dropout 0 --phrase-dim 16 --num-workers 0 "
        )
        words += (
            "--best-checkpoint-metric accuracy --maximize-best-checkpoint-metric --log-format simple --log-interval 1"
        )
        where = ["--encoder", self.context, "--save-dir", save_dir, "--max-update", updates]
        return ["fairseq-train", self.phrases, *words.split(), *where, *extra]


@pytest.fixture(scope="session")
def ccpr(tmp_path_factory: pytest.TempPathFactory) -> Ccpr:
    folder = tmp_path_factory.mktemp("ccpr")
    made = Ccpr(folder / "pairs.tsv", folder / "context", folder / "phrases", folder / "run/checkpoint_best.pt", "")
    rows = list(itertools.islice(read_pairs(DEMO / "bible.train.tsv.xz"), 300))
    made.pairs.write_text("".join(f"{source}\t{target}\n" for source, target in rows), encoding="utf-8")
    random_context(rows, made.context)
    call(
        "extract_phrases", "--pairs", made.pairs, "-s", "de", "-t", "en", "--valid", 60, "--aligner", "fast-align",
        "--max-edge-share", 0.02, "--max-phrase-words", 4, "--output", made.phrases, "--quiet",
    )  # fmt: skip
    made.log = run(*made.training(made.checkpoint.parent, 40)).stdout
    return made


@dataclass
class Xpr:
    """A tiny XPR encoder that was trained on word pairs of a few verses, and what it was made from."""

    pairs: Path  # TSV of phrase pairs
    texts: tuple[Path, Path]
    context: Path
    lexicon: Path  # with train, valid and test
    checkpoint: Path
    log: str  # of fairseq-train

    def training(self, save_dir: Path, updates: int, *extra: object) -> list[object]:
        """The command line of fairseq-train."""
        words = f"--user-dir {USER_DIR} --task phrase_lexicon --arch phrase_encoder_xpr --criterion xpco --cpu "
        words += (
            "--optimizer adam --lr 5e-3 --batch-size 32 --max-subwords 60 --dropout 0 --phrase-dim 16 --num-workers 0 "
        )
        words += (
            "--best-checkpoint-metric accuracy --maximize-best-checkpoint-metric --log-format simple --log-interval 1"
        )
        where = ["--encoder", self.context, "--save-dir", save_dir, "--max-update", updates, "--encoder-momentum", 0.9]
        return ["fairseq-train", self.lexicon, *words.split(), *where, *extra]


@pytest.fixture(scope="session")
def xpr(ccpr: Ccpr, tmp_path_factory: pytest.TempPathFactory) -> Xpr:
    folder = tmp_path_factory.mktemp("xpr")
    texts = folder / "text.de", folder / "text.en"
    rows = list(read_pairs(ccpr.pairs))
    for path, side in zip(texts, zip(*rows)):
        path.write_text("\n".join(side) + "\n", encoding="utf-8")
    made = Xpr(folder / "pairs.tsv", texts, ccpr.context, folder / "lexicon", folder / "run/checkpoint_best.pt", "")
    store = PhrasePairs(ccpr.phrases / "train")
    strings = dict.fromkeys(
        (source[a:b], target[c:d])
        for number in range(store.sentences)
        for source, target in [store.sentence(number)]
        for _, a, b, c, d in store.pairs_of(number).tolist()
    )
    lines = [f"{source}\t{target}\n" for source, target in list(strings)[:400]]
    made.pairs.write_text("".join(lines), encoding="utf-8")
    call(
        "build_lexicon_dataset", "--pairs", made.pairs, "--source-text", texts[0], "--target-text", texts[1],
        "--output", made.lexicon, "-s", "de", "-t", "en", "--examples", 6,
    )  # fmt: skip
    made.log = run(*made.training(made.checkpoint.parent, 24)).stdout
    return made


@pytest.fixture(scope="session")
def mono(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target sentences of training and test."""
    path = tmp_path_factory.mktemp("phrases") / "mono.txt"
    subsets = ("train.tsv", "test.tsv")
    lines = [target for name in subsets for _, target in list(read_pairs(world.folder / name))[-150:]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def phrase_store(ccpr: Ccpr, mono: Path) -> Path:
    """Phrases alone."""
    words = ["--encoder", ccpr.checkpoint, "--output", mono.parent / "alone", "--segmentation", "all", "--max-words", 3]
    call("build_datastore", "phrases", mono, *words, "--cpu", "--quiet")
    return mono.parent / "alone"


@pytest.fixture(scope="session")
def both(world: World, phrase_store: Path) -> Path:
    """Tokens and phrases in one folder."""
    folder = phrase_store.parent / "both"
    shutil.copytree(world.datastore, folder)
    shutil.copytree(phrase_store / "phrase", folder / "phrase")
    manifest = Manifest.read(folder)
    manifest.phrase = Manifest.read(phrase_store).phrase
    manifest.write(folder)
    return folder


def subword_options(world: World) -> list[object]:
    return ["--bpe", "sentencepiece", "--sentencepiece-model", world.spm]


def random_context(rows: list[tuple[str, str]], directory: Path) -> None:
    """Save a context encoder of random weights, and a vocabulary learnt from sentence pairs."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(side for row in rows for side in row), model_writer=model, vocab_size=600, minloglevel=2,
    )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    symbols = [processor.id_to_piece(i) for i in range(3, len(processor))]
    torch.manual_seed(1)
    settings = {"layers": 2, "embed_dim": 32, "ffn_embed_dim": 64, "attention_heads": 2}
    arguments = Namespace(max_positions=202, **{f"encoder_{name}": value for name, value in settings.items()})
    random_weights(arguments, SentencePieceTokenizer(symbols, model.getvalue())).save(directory)


def random_weights(arguments: Namespace, tokenizer: SubwordTokenizer) -> ContextEncoder:
    """A context encoder that has learnt nothing."""
    roberta = RobertaModel.build_model(arguments, SimpleNamespace(source_dictionary=tokenizer.dictionary))
    return ContextEncoder(arguments, tokenizer, roberta.state_dict())


def train(data_bin: Path, save_dir: Path, updates: int, seed: int) -> None:
    """Train a tiny Transformer with fairseq-train, in bf16 on the CPU."""
    call(
        "fairseq-train", data_bin, "--user-dir", USER_DIR, "--task", "translation_cpu_bf16", "--arch", "transformer",
        "--max-tokens", 2000, "--max-update", updates, "--seed", seed, "--save-dir", save_dir, "--cpu", *TINY.split(),
        "--disable-validation",
    )  # fmt: skip


def build_options(world: World, output: Path) -> list[object]:
    """Options of `build_datastore.py` for a token datastore with exact search."""
    return [
        "tokens", world.data_bin, "--path", world.model, "-s", "de", "-t", "en", "--output", output, "--index", "exact",
        "--max-tokens", 1500, "--cpu", "--quiet",
    ]  # fmt: skip


def build(world: World, output: Path, *extra: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Build a token datastore with the command."""
    return call("build_datastore", *build_options(world, output), *extra, check=check)


@pytest.fixture(scope="session")
def decode(world: World) -> Callable[..., dict[int, list[dict[str, Any]]]]:
    """Decode the test subset as fairseq-generate does; gives the hypotheses of each sentence."""

    def run_generator(*extra: object, base: bool = False) -> dict[int, list[dict[str, Any]]]:
        parser = options.get_generation_parser()
        words = world.options("--max-tokens", 2000, *extra)
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, input_args=words))
        utils.set_torch_seed(1)
        task, models = load(cfg)
        make = task.build_base_generator if base else task.build_generator
        generator = make(models, cfg.generation)
        found = {}
        iterator = task.get_batch_iterator(
            task.dataset("test"), max_tokens=cfg.dataset.max_tokens, max_sentences=cfg.dataset.batch_size
        )
        for sample in iterator.next_epoch_itr(shuffle=False):
            size = cfg.generation.prefix_size
            prefix = sample["target"][:, :size] if size else None
            hypotheses = task.inference_step(generator, models, sample, prefix_tokens=prefix)
            found.update(zip(sample["id"].tolist(), hypotheses))
        return found

    return run_generator


def equal(one: dict[int, list[dict[str, Any]]], two: dict[int, list[dict[str, Any]]], tolerance: float = 0.0) -> bool:
    """Whether two decodings have the same hypotheses, and scores that differ by no more than `tolerance`."""
    pairs = [(a, b) for i in one for a, b in zip(one[i], two[i])]
    return (
        one.keys() == two.keys()
        and all(len(one[i]) == len(two[i]) for i in one)
        and all(torch.equal(a["tokens"], b["tokens"]) for a, b in pairs)
        and all((a["positional_scores"] - b["positional_scores"]).abs().max() <= tolerance for a, b in pairs)
    )
