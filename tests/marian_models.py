"""Small Marian models, written as Hugging Face writes them."""

from __future__ import annotations

import functools
import io
import itertools
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import sentencepiece
import torch

from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import DEMO

POSITIONS = 96
TINY = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "activation_function": "swish",
}  # fmt: skip
TAGS = (">>eng<<", ">>fra<<")


@functools.cache
def transformers() -> ModuleType:
    """The package, told that there is no torchaudio: fairseq brings one, whose last release may be for another torch."""
    sys.modules.setdefault("torchaudio", None)  # type: ignore[arg-type]
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@functools.cache
def pieces(side: int, count: int = 400) -> bytes:
    """A SentencePiece model of the demo's source (0) or target text (1)."""
    model = io.BytesIO()
    pairs = itertools.islice(read_pairs(DEMO / "bible.train.tsv.xz"), 1500)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(pair[side] for pair in pairs), model_writer=model, vocab_size=count, minloglevel=2
    )
    return model.getvalue()


def symbols(*models: bytes) -> dict[str, int]:
    """A vocabulary as OPUS-MT has it: the pieces of all models, specials at both ends."""
    found = dict.fromkeys(["</s>", "<unk>"])
    for model in models:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        found |= dict.fromkeys(processor.id_to_piece(number) for number in range(3, len(processor)))
    return {symbol: number for number, symbol in enumerate([*found, "<pad>"])}


def write_marian(
    folder: Path, separate: bool = False, tags: tuple[str, ...] = (), spread: float = 0.0, **settings: Any
) -> Any:
    """Write a folder with a model of random weights, and return the model.

    Args:
        separate: source and target have vocabularies of their own.
        tags: target languages of the model.
        spread: of the weights, 1 keeps the size of states; 0: as in training from scratch.
        settings: of `MarianConfig`.
    """
    folder.mkdir()
    models = pieces(0), pieces(1)
    vocabularies = [symbols(models[0]), symbols(models[1], models[1])] if separate else [symbols(*models)]
    if tags:
        vocabularies[0] = {
            symbol: at for at, symbol in enumerate([*list(vocabularies[0])[:-1], *tags, "<pad>"])
        }
    source, target = vocabularies[0], vocabularies[-1]
    config = transformers().MarianConfig(
        vocab_size=len(source), decoder_vocab_size=len(target), share_encoder_decoder_embeddings=not separate,
        pad_token_id=source["<pad>"], decoder_start_token_id=target["<pad>"], eos_token_id=0, forced_eos_token_id=None,
        max_position_embeddings=POSITIONS, **{"scale_embedding": True, **settings},
    )  # fmt: skip
    model = transformers().MarianMTModel(config).eval()
    if spread:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1 and "positions" not in name:
                    parameter.normal_(std=spread * parameter.size(1) ** -0.5)
                    parameter[source["<pad>"] if len(parameter) == len(source) else target["<pad>"] :].zero_()
            model.final_logits_bias.normal_(std=0.3)
            end_some(model)
    save_marian(folder, model, vocabularies, models)
    return model


def train_marian(folder: Path, rows: list[tuple[str, str]], updates: int) -> None:
    """Train a model of transformers on sentence pairs, with its own tokenizer."""
    model = write_marian(folder, **TINY, dropout=0.0, init_std=0.05).train()
    tokenizer = transformers().MarianTokenizer.from_pretrained(folder)
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
    rows = sorted(rows, key=lambda row: len(row[1]))
    for _ in range(updates):
        start = random.randrange(len(rows) - 32)
        sources, targets = zip(*rows[start : start + 32])
        batch = tokenizer(list(sources), text_target=list(targets), return_tensors="pt", padding=True)
        batch["labels"][batch["labels"] == model.config.pad_token_id] = -100
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    model.eval().save_pretrained(folder)


def end_some(model: Any, share: float = 0.3) -> None:
    """Let a model of random weights end some sentences: </s> becomes the likeliest symbol at this share of tokens."""
    config = model.config
    sources, targets = (
        torch.randint(2, size - 1, (16, 20)) for size in (config.vocab_size, config.decoder_vocab_size)
    )
    logits = model(input_ids=sources, decoder_input_ids=targets).logits.flatten(0, 1)
    margins = logits[:, 1:].max(dim=1).values - logits[:, 0]
    model.final_logits_bias[:, 0] += margins.quantile(share)


def save_marian(
    folder: Path, model: Any, vocabularies: list[dict[str, int]], models: tuple[bytes, bytes], **saving: Any
) -> None:
    """Write a model with its vocabularies and SentencePiece models, as they are downloaded."""
    model.save_pretrained(folder, **saving)
    for name, vocabulary in zip(("vocab.json", "target_vocab.json"), vocabularies):
        (folder / name).write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    told = {"source_lang": "de", "target_lang": "en", "separate_vocabs": len(vocabularies) > 1}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    for name, content in zip(("source.spm", "target.spm"), models):
        (folder / name).write_bytes(content)
