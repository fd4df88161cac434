"""Tiny models, encoders and datastores, and the command lines that make them."""

from __future__ import annotations

import functools
import io
import lzma
import shutil
import subprocess
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import sentencepiece
import torch
from fairseq.models.roberta import RobertaModel

from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.models.phrase_encoder import PhraseEncoder
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder
from fairseq_ccpr.phrases.pair_store import PhrasePairs
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.text.sentencepiece import read_pieces
from fairseq_ccpr.text.subwords import SubwordTokenizer
from fairseq_ccpr.text.tokenizers import SentencePieceTokenizer, load_tokenizer
from fairseq_ccpr.training.contrast_dataset import PhraseContrastDataset
from tests.helpers import DEMO, USER_DIR, call

PAIRS = {"train": 600, "valid": 24, "test": 20}
TINY = "--encoder-layers 1 --decoder-layers 2 --encoder-embed-dim 32 --encoder-ffn-embed-dim 64 "
TINY += "--encoder-attention-heads 2 --decoder-attention-heads 2 --share-all-embeddings --dropout 0 "
TINY += "--optimizer adam --lr 5e-3 --criterion cross_entropy --no-epoch-checkpoints --no-progress-bar"


@dataclass
class World:
    """What the tests work with."""

    folder: Path
    data_bin: Path
    spm: Path
    model: Path
    other_model: Path  # same dictionary, other weights
    datastore: Path  # of `model`, exact search

    @classmethod
    def within(cls, folder: Path, datastore: Path) -> World:
        """Name what is, or is to be, in a folder; the datastore is elsewhere."""
        data_bin, model = folder / "data-bin", "checkpoint_last.pt"
        return cls(
            folder,
            data_bin,
            data_bin / "spm.model",
            folder / "model" / model,
            folder / "other" / model,
            datastore,
        )

    def options(self, *extra: object) -> list[str]:
        """Options of fairseq-generate for this model and datastore."""
        words = [
            self.data_bin,
            "--user-dir",
            USER_DIR,
            "--task",
            "translation_retrieval",
            "-s",
            "de",
            "-t",
            "en",
        ]
        words += ["--path", self.model, "--datastore", self.datastore, "--cpu", "--tokens-temperature", 5]
        words += ["--max-len-b", 25, *extra]
        return [str(word) for word in words]


@dataclass
class Ccpr:
    """A tiny phrase encoder that was trained on a few verses, and what it was made from."""

    pairs: Path  # TSV of all verses
    context: Path  # the encoder directory that training started from
    phrases: Path  # with train and valid
    checkpoint: Path
    log: str  # of fairseq-train

    @classmethod
    def within(cls, folder: Path) -> Ccpr:
        """Name what is, or is to be, in a folder."""
        checkpoint = folder / "run/checkpoint_best.pt"
        return cls(folder / "pairs.tsv", folder / "context", folder / "phrases", checkpoint, log_in(folder))

    def training(self, save_dir: Path, updates: int, *extra: object) -> list[object]:
        """The command line of fairseq-train."""
        words = f"--user-dir {USER_DIR} --task phrase_contrast --arch phrase_encoder --criterion ccpr --cpu "
        words += "--optimizer adam --lr 5e-3 --batch-size 24 --max-subwords 100 --dropout 0 --phrase-dim 16 --num-workers 0 "
        words += "--best-checkpoint-metric accuracy --maximize-best-checkpoint-metric --log-format simple --log-interval 1"
        where = ["--encoder", self.context, "--save-dir", save_dir, "--max-update", updates]
        return ["fairseq-train", self.phrases, *words.split(), *where, *extra]

    def dataset(self, split: str = "valid", **changes: float) -> PhraseContrastDataset:
        """What its training or validation draws from, with options of their own."""
        options = {
            "phrases_per_sentence": 8,
            "different_context_fraction": 0.0,
            "max_subwords": 100,
            "seed": 1,
        }
        tokenizer = load_tokenizer(self.context)
        return PhraseContrastDataset(PhrasePairs(self.phrases / split), tokenizer, **options | changes)


@dataclass
class Xpr:
    """A tiny XPR encoder that was trained on word pairs of a few verses, and what it was made from."""

    pairs: Path  # TSV of phrase pairs
    texts: tuple[Path, Path]
    context: Path
    lexicon: Path  # with train, valid and test
    checkpoint: Path
    log: str  # of fairseq-train

    @classmethod
    def within(cls, folder: Path, context: Path) -> Xpr:
        """Name what is, or is to be, in a folder; the context encoder is elsewhere."""
        texts, checkpoint = (folder / "text.de", folder / "text.en"), folder / "run/checkpoint_best.pt"
        return cls(folder / "pairs.tsv", texts, context, folder / "lexicon", checkpoint, log_in(folder))

    def training(self, save_dir: Path, updates: int, *extra: object) -> list[object]:
        """The command line of fairseq-train."""
        words = f"--user-dir {USER_DIR}/lab/xpr --task phrase_lexicon --arch phrase_encoder_xpr --criterion xpco --cpu "
        words += "--optimizer adam --lr 5e-3 --batch-size 32 --max-subwords 60 --dropout 0 --phrase-dim 16 --num-workers 0 "
        words += "--best-checkpoint-metric accuracy --maximize-best-checkpoint-metric --log-format simple --log-interval 1"
        where = [
            "--encoder",
            self.context,
            "--save-dir",
            save_dir,
            "--max-update",
            updates,
            "--encoder-momentum",
            0.9,
        ]
        return ["fairseq-train", self.lexicon, *words.split(), *where, *extra]


def log_in(folder: Path) -> str:
    path = folder / "log"
    return path.read_text() if path.exists() else ""


def subword_options(world: World) -> list[object]:
    return ["--bpe", "sentencepiece", "--sentencepiece-model", world.spm]


def random_context(rows: list[tuple[str, str]], directory: Path) -> None:
    """Save a context encoder of random weights, and a vocabulary learned from sentence pairs."""
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
    """A context encoder that has learned nothing."""
    roberta = RobertaModel.build_model(arguments, SimpleNamespace(source_dictionary=tokenizer.dictionary))
    return ContextEncoder(arguments, tokenizer, roberta.state_dict())


def train(data_bin: Path, save_dir: Path, updates: int, seed: int) -> None:
    """Train a tiny Transformer with fairseq-train, in fp32, so that it differs little from processor to processor."""
    call(
        "fairseq-train", data_bin, "--task", "translation", "--arch", "transformer",
        "--max-tokens", 2000, "--max-update", updates, "--seed", seed, "--save-dir", save_dir, "--cpu", *TINY.split(),
        "--disable-validation", "--no-save-optimizer-state",
    )  # fmt: skip


def build_options(world: World, output: Path) -> list[object]:
    """Options of `fairseq-ccpr build` for a token datastore with exact search."""
    return [
        "tokens", world.data_bin, "--path", world.model, "-s", "de", "-t", "en", "--output", output, "--index", "exact",
        "--max-tokens", 1500, "--cpu", "--quiet",
    ]  # fmt: skip


def build(world: World, output: Path, *extra: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Build a token datastore with the command."""
    return call("build", *build_options(world, output), *extra, check=check)


def demo_lines(count: int) -> list[str]:
    """The first rows of the demo's validation text."""
    with lzma.open(DEMO / "bible.valid.tsv.xz", "rt", encoding="utf-8") as stream:
        return [line.rstrip("\n") for line, _ in zip(stream, range(count))]


def train_unigram(pieces: int) -> bytes:
    """Train a SentencePiece model on them."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(demo_lines(400)), model_writer=model, vocab_size=pieces, model_type="unigram", minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


VOCABULARY = [
    "[PAD]",
    "[unused1]",
    "the",
    "[UNK]",
    "[CLS]",
    "lo",
    "##rd",
    "[SEP]",
    "[MASK]",
    "l",
    "##o",
    "god",
    ",",
    ";",
    "中",
]
VOCABULARY += ["and", "##s", "aid", "n", "!", "##i", "##g", "##h", "##t", "u", "le"]


@functools.cache
def sentencepiece_tokenizer() -> SentencePieceTokenizer:
    model = train_unigram(300)
    return SentencePieceTokenizer(read_pieces(model)[3:], model)


VERSES = [target for _, target in read_pairs(DEMO / "bible.valid.tsv.xz")][:240]


def random_encoders(folder: Path) -> dict[str, Path]:
    """Tiny ones with random weights: a directory, and two checkpoints as fairseq-train leaves them."""
    arguments = Namespace(
        encoder_layers=1, encoder_embed_dim=16, encoder_ffn_embed_dim=24, encoder_attention_heads=2, max_positions=120,
    )  # fmt: skip
    paths = {}
    for name, seed, similarity in (("ccpr", 1, "cosine"), ("cpr", 2, "dot")):
        torch.manual_seed(seed)
        context = random_weights(arguments, sentencepiece_tokenizer())
        with torch.no_grad():
            for part, parameter in context.named_parameters():
                noise = torch.randn_like(parameter) * 0.3
                if "norm" not in part:
                    parameter.copy_(noise)
            context.transformer.embed_positions.weight.mul_(0.1)  # words rather than places decide
        encoder = PhraseEncoder(context, 8, similarity, 0.05)
        (folder / name).mkdir()
        context.tokenizer.save(folder / name)
        history = {"optimizer_name": "FairseqAdam", "lr_scheduler_state": {}, "num_updates": 1}
        state = {"model": encoder.state_dict(), "cfg": {"model": {"similarity": similarity}}}
        state |= {"optimizer_history": [history], "extra_state": {"train_iterator": {"epoch": 1}}}
        paths[name] = folder / name / "checkpoint_best.pt"
        torch.save(state | {"task_state": {"context": vars(context.arguments)}}, paths[name])
    context.save(folder / "raw")
    return paths | {"raw": folder / "raw"}


def build_phrases(
    ccpr: Ccpr, text: Path | list[Path], output: Path, *extra: object, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Build a phrase datastore with the command, in shards small enough to have several."""
    texts = text if isinstance(text, list) else [text]
    words: list[object] = [
        "phrases",
        *texts,
        "--encoder",
        ccpr.checkpoint,
        "--output",
        output,
        "--cpu",
        "--quiet",
    ]
    words += [] if "--threshold" in extra else ["--threshold", 0.5]
    return call("build", *words, "--chunk-sentences", 32, "--max-words", 5, *extra, check=check)


def entries(store: PhraseDatastore) -> list[tuple[int, str]]:
    """Sentence and string of each entry."""
    return [(number, store.sentence(number)[start:end]) for number, start, end in store.spans.tolist()]


def other_encoder(ccpr: Ccpr, folder: Path) -> Path:
    """The same encoder with another head, next to its tokenizer."""
    shutil.copytree(ccpr.checkpoint.parent, folder)
    state = torch.load(path := folder / ccpr.checkpoint.name)
    state["model"]["align.bias"] += 1
    torch.save(state, path)
    return path
