"""Speed of a converted Marian model compared with transformers and CTranslate2, on the same sentences.

python scripts/marian_speed.py FOLDER [--text FILE] [--beam 5] [--tokens N]

FOLDER is a model of Hugging Face on disk, such as OPUS-MT's; if it does not exist, a random one of that size is made there,
which ends its sentences after some 25 tokens. All compute in fp32. With OMP_NUM_THREADS=1 the time is the processor's, which
other programs change little. Needs transformers; CTranslate2 is left out where it is not installed (pip install ctranslate2).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.modules.setdefault("torchaudio", None)  # type: ignore[arg-type]  # fairseq's may be for another torch; transformers looks
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import transformers
from sentencepiece import SentencePieceProcessor

from fairseq_ccpr import Translator
from fairseq_ccpr.cli.command import markdown_table
from fairseq_ccpr.conversion import CHECKPOINT, convert_marian
from fairseq_ccpr.text.pairs import read_lines, read_pairs

DEMO = ROOT / "datastores" / "demo"
BASE: dict[str, Any] = {
    "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8, "decoder_attention_heads": 8,
    "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "activation_function": "swish", "scale_embedding": True,
    "max_position_embeddings": 512,
}  # fmt: skip  # of OPUS-MT's bilingual models
LENGTH = 25  # of what a random model writes, in tokens


def make_random(folder: Path, vocabulary_size: int) -> None:
    processor = SentencePieceProcessor(model_file=str(DEMO / "spm.model"))
    pieces = [processor.id_to_piece(number) for number in range(3, len(processor))]
    fillers = [f"<unused{number}>" for number in range(vocabulary_size - len(pieces) - 3)]
    symbols = ["</s>", "<unk>", *pieces, *fillers, "<pad>"]
    last = len(symbols) - 1
    config = transformers.MarianConfig(
        vocab_size=len(symbols), pad_token_id=last, decoder_start_token_id=last, eos_token_id=0, forced_eos_token_id=None,
        **BASE,
    )  # fmt: skip
    model = transformers.MarianMTModel(config).eval()
    vary(model)
    model.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({symbol: number for number, symbol in enumerate(symbols)}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"source_lang": "de", "target_lang": "en"}))
    for name in ("source.spm", "target.spm"):
        shutil.copyfile(DEMO / "spm.model", folder / name)


@torch.no_grad()
def vary(model: Any) -> None:
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "positions" not in name:
            parameter.normal_(std=1.2 * parameter.size(1) ** -0.5)
            if len(parameter) == model.config.vocab_size:
                parameter[model.config.pad_token_id].zero_()
    drawn = torch.randint(2, model.config.pad_token_id, (2, 32, 20))
    logits = model(input_ids=drawn[0], decoder_input_ids=drawn[1]).logits.flatten(0, 1)
    model.final_logits_bias[:, 0] += (logits[:, 1:].amax(dim=1) - logits[:, 0]).quantile(1 / LENGTH)


def with_fairseq(folder: Path, beam: int, tokens: int, batch: int) -> Callable[[list[str]], int]:
    with tempfile.TemporaryDirectory() as made:
        convert_marian(folder, Path(made) / "model", None, None, None)
        lengths: dict[str, Any] = {"min_len": tokens, "max_len_b": tokens} if tokens else {"max_len_b": 200}
        translator = Translator(
            Path(made) / "model" / CHECKPOINT, beam=beam, device="cpu", batch_size=batch, **lengths
        )
    return lambda texts: sum(len(one.tokens) for one in translator.translate(texts))


def with_transformers(folder: Path, beam: int, tokens: int, batch: int) -> Callable[[list[str]], int]:
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    model = transformers.MarianMTModel.from_pretrained(folder, dtype=torch.float32).eval()
    lengths: dict[str, Any] = (
        {"min_new_tokens": tokens, "max_new_tokens": tokens} if tokens else {"max_new_tokens": 200}
    )
    pad = model.config.pad_token_id
    settings = lengths | {"do_sample": False, "bad_words_ids": [[pad]]}

    @torch.inference_mode()
    def translate(texts: list[str]) -> int:
        count = 0
        ordered = sorted(texts, key=len)
        for start in range(0, len(ordered), batch):
            inputs = tokenizer(ordered[start : start + batch], return_tensors="pt", padding=True)
            made = model.generate(**inputs, num_beams=beam, early_stopping=True, **settings)
            count += int(((made != pad) & (made != model.config.eos_token_id)).sum())
        return count

    return translate


def with_ctranslate2(folder: Path, beam: int, tokens: int, batch: int) -> Callable[[list[str]], int]:
    import ctranslate2

    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as made:
        ctranslate2.converters.TransformersConverter(str(folder)).convert(f"{made}/model", force=True)
        translator = ctranslate2.Translator(
            f"{made}/model", device="cpu", compute_type="float32", intra_threads=threads()
        )
    lengths: dict[str, Any] = (
        {"min_decoding_length": tokens, "max_decoding_length": tokens}
        if tokens
        else {"max_decoding_length": 200}
    )

    def translate(texts: list[str]) -> int:
        encoded = [tokenizer.convert_ids_to_tokens(ids) for ids in tokenizer(texts)["input_ids"]]
        made = translator.translate_batch(encoded, beam_size=beam, max_batch_size=batch, **lengths)
        return sum(len(one.hypotheses[0]) for one in made)

    return translate


SYSTEMS = {
    "fairseq-ccpr, converted": with_fairseq,
    "transformers": with_transformers,
    "CTranslate2": with_ctranslate2,
}


def threads() -> int:
    return int(os.environ.get("OMP_NUM_THREADS", 0)) or len(os.sched_getaffinity(0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, help="source sentences, one per line (the demo's test text)")
    parser.add_argument("--sentences", type=int, default=64)
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16, help="sentences in a batch")
    parser.add_argument("--tokens", type=int, default=0, help="length of each translation (0: as they end)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="of which the best counts; the systems take turns"
    )
    parser.add_argument("--vocabulary", type=int, default=16000, help="entries of a random model")
    options = parser.parse_args()
    if not options.folder.exists():
        make_random(options.folder, options.vocabulary)
    if options.text is not None:
        texts = list(read_lines(options.text))
    else:
        texts = [source for source, _ in read_pairs(DEMO / "bible.test.tsv.xz")]
    texts = texts[: options.sentences]
    torch.set_num_threads(threads())
    kinds = {
        name: make
        for name, make in SYSTEMS.items()
        if name != "CTranslate2" or importlib.util.find_spec("ctranslate2")
    }
    systems = {
        name: make(options.folder, options.beam, options.tokens, options.batch)
        for name, make in kinds.items()
    }
    clock = time.process_time if threads() == 1 else time.perf_counter
    best: dict[str, tuple[float, int]] = {}
    for _ in range(options.repeats):
        for name, translate in systems.items():
            start = clock()
            count = translate(texts)
            best[name] = min(best.get(name, (float("inf"), 0)), (clock() - start, count))
    rows = [
        [name, count, f"{seconds:.2f}", f"{count / seconds:,.0f}"] for name, (seconds, count) in best.items()
    ]
    print(markdown_table([["system", "tokens", "seconds", "tokens/s"], *rows]))


if __name__ == "__main__":
    main()
