"""Train a fairseq Transformer on one GPU several times as fast as fairseq-train does, for as long as the clock says.

python scripts/recipes/train_on_gpu.py DATA_BIN -s de -t en --output model.pt --minutes 5

All sentences are on the GPU, in bf16 but for weights and sums; sentences of similar length form batches of a few shapes, and
an update of each shape is one CUDA graph, so that nothing waits for the host. The learning rate rises for --warmup updates
and then falls to 0 as the minutes pass. Training that diverges ends at once. The checkpoint loads in fairseq like any other.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from fairseq.data import Dictionary, data_utils
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer.transformer_legacy import base_architecture
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from fairseq_ccpr.models.checkpoint import as_checkpoint
from fairseq_ccpr.storage.files import atomic_file

LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128)  # subwords of a batch's sentences; longer ones are left out
BETAS, EPSILON, CLIP, REPORTED = (0.9, 0.98), 1e-8, 1.0, 10


class Side:
    """One side of the sentences, on the device."""

    def __init__(self, prefix: Path, language: str, dictionary: Dictionary, device: torch.device) -> None:
        dataset = data_utils.load_indexed_dataset(f"{prefix}.{language}", dictionary, "mmap")
        self.lengths = np.array(dataset.sizes, dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])
        flat = np.fromfile(f"{prefix}.{language}.bin", dtype=dataset._index.dtype)
        self.tokens = torch.from_numpy(flat.astype(np.int32)).to(device)
        self.starts, self.sizes = (torch.from_numpy(array).to(device) for array in (starts, self.lengths))
        self.pad = dictionary.pad()

    def gather(self, sentences: Tensor, length: int) -> Tensor:
        """Collect sentences int64 [B] as int64 [B, length], padded on the right."""
        columns = torch.arange(length, device=sentences.device)
        places = (self.starts[sentences].unsqueeze(1) + columns).clamp_max(len(self.tokens) - 1)
        inside = columns < self.sizes[sentences].unsqueeze(1)
        return self.tokens[places].long().masked_fill(~inside, self.pad)


class Corpus:
    """Sentence pairs by length."""

    def __init__(self, prefix: Path, arguments: argparse.Namespace, dictionary: Dictionary, device: torch.device) -> None:
        source, target = arguments.source_lang, arguments.target_lang
        pair = next((p for p in (f"{source}-{target}", f"{target}-{source}") if Path(f"{prefix}.{p}.{source}.bin").exists()), "")
        if not pair:
            sys.exit(f"{prefix.parent} has no {prefix.name}.{source}-{target}.{source}.bin: give the folder that prepare wrote")
        self.source, self.target = (Side(Path(f"{prefix}.{pair}"), side, dictionary, device) for side in (source, target))
        longest = np.maximum(self.source.lengths, self.target.lengths)
        self.shapes = np.searchsorted(LENGTHS, longest)
        self.members = {
            shape: torch.from_numpy(np.flatnonzero(self.shapes == shape)).to(device)
            for shape in range(len(LENGTHS))
            if (self.shapes == shape).any()
        }

    def batches(self, tokens: int) -> list[tuple[int, Tensor]]:
        """Shuffle all pairs into batches of one shape each: (shape, sentences int64 [B]); the last pairs of a shape wrap."""
        batches = []
        for shape, members in self.members.items():
            rows = max(tokens // LENGTHS[shape], 1)
            order = members[torch.randperm(len(members), device=members.device)]
            whole = -(-len(order) // rows) * rows
            order = order.repeat(-(-whole // len(order)))[:whole]
            batches += [(shape, part) for part in order.split(rows)]
        random.shuffle(batches)
        return batches


def attend(weights: torch.nn.Module, query: Tensor, memory: Tensor, heads: int, mask: Tensor | None, causal: bool, dropout: float) -> Tensor:
    """Compute fairseq's MultiheadAttention of [B, T, C] over [B, S, C]; mask: bool [B, 1, 1, S], what may be seen."""
    q, k, v = (
        functional.linear(x, half(projection.weight), half(projection.bias)).unflatten(2, (heads, -1)).transpose(1, 2)
        for x, projection in ((query, weights.q_proj), (memory, weights.k_proj), (memory, weights.v_proj))
    )
    mixed = functional.scaled_dot_product_attention(q, k, v, mask, dropout, causal).transpose(1, 2).flatten(2)
    return functional.linear(mixed, half(weights.out_proj.weight), half(weights.out_proj.bias))


def half(weights: Tensor) -> Tensor:
    return weights.to(DTYPE)


def norm(layer: torch.nn.LayerNorm, x: Tensor) -> Tensor:
    return half(functional.layer_norm(x, layer.normalized_shape, layer.weight, layer.bias, layer.eps))


DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32  # which CPUs without bf16 only imitate


def forward(model: TransformerModel, source: Tensor, previous: Tensor, dropout: float) -> Tensor:
    """Compute the states before the output projection, as the model itself does where dropout is 0: [B, T, C].

    Layers are normalised before (fairseq's --encoder-normalize-before), sums are fp32 and products `DTYPE`.
    """
    pad, heads = model.encoder.padding_idx, model.args.encoder_attention_heads
    width = model.args.encoder_embed_dim
    seen = source.ne(pad)[:, None, None]

    def drop(x: Tensor) -> Tensor:
        return functional.dropout(x, dropout, dropout > 0)

    def feed(layer: torch.nn.Module, x: Tensor) -> Tensor:
        hidden = functional.relu(functional.linear(norm(layer.final_layer_norm, x), half(layer.fc1.weight), half(layer.fc1.bias)))
        return x + drop(functional.linear(hidden, half(layer.fc2.weight), half(layer.fc2.bias))).float()

    def embed(tokens: Tensor, side: torch.nn.Module) -> Tensor:
        places = torch.arange(tokens.size(1), device=tokens.device) + pad + 1
        places = torch.where(tokens.ne(pad), places, pad)
        return drop(functional.embedding(tokens, side.embed_tokens.weight) * math.sqrt(width) + TABLE[places])

    x = embed(source, model.encoder) * seen[:, 0, 0, :, None]
    for layer in model.encoder.layers:
        h = norm(layer.self_attn_layer_norm, x)
        x = feed(layer, x + drop(attend(layer.self_attn, h, h, heads, seen, False, dropout)).float())
    memory = norm(model.encoder.layer_norm, x)

    x = embed(previous, model.decoder)
    for layer in model.decoder.layers:
        h = norm(layer.self_attn_layer_norm, x)
        x = x + drop(attend(layer.self_attn, h, h, heads, None, True, dropout)).float()
        h = norm(layer.encoder_attn_layer_norm, x)
        x = feed(layer, x + drop(attend(layer.encoder_attn, h, memory, heads, seen, False, dropout)).float())
    return norm(model.decoder.layer_norm, x)


TABLE = torch.zeros(0)


def loss_of(model: TransformerModel, source: Tensor, target: Tensor, dropout: float, smoothing: float) -> tuple[Tensor, Tensor]:
    """Compute the training loss per token and the number of tokens; the sentences end in </s>, which is also what begins."""
    pad = model.decoder.padding_idx
    previous = torch.cat([torch.full_like(target[:, :1], EOS), target[:, :-1]], dim=1)
    previous = previous.masked_fill(target.eq(pad), pad)  # what follows </s> counts for nothing
    states = forward(model, source, previous, dropout)
    logits = functional.linear(states, half(model.decoder.output_projection.weight)).flatten(0, 1)
    total = functional.cross_entropy(logits.float(), target.flatten(), ignore_index=pad, label_smoothing=smoothing, reduction="sum")
    count = target.ne(pad).sum()
    return total / count, count


EOS = 2


class Trainer:
    """Updates of one model; on a GPU a graph for each shape."""

    def __init__(self, model: TransformerModel, arguments: argparse.Namespace, device: torch.device) -> None:
        self.model, self.arguments, self.device = model, arguments, device
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.rate = torch.zeros((), device=device)
        cuda = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=self.rate, betas=BETAS, eps=EPSILON, weight_decay=0.0, fused=True, capturable=cuda
        )
        self.loss, self.bad = torch.zeros((), device=device), torch.zeros((), device=device)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle() if cuda else None
        self.seen: dict[int, int] = {}

    def _update(self, source: Tensor, target: Tensor) -> None:
        loss, _ = loss_of(self.model, source, target, self.arguments.dropout, self.arguments.label_smoothing)
        gradients = torch.autograd.grad(loss, self.parameters)
        size = torch.stack(torch._foreach_norm(gradients)).norm()
        for parameter, gradient in zip(self.parameters, gradients):
            parameter.grad = gradient
        # The fused step divides by the scale, and leaves everything as it is where the gradient is no number.
        self.optimizer.grad_scale = (size / CLIP).clamp_min(1.0)
        self.optimizer.found_inf = (~size.isfinite()).float()
        self.optimizer.step()
        self.loss += loss.detach().nan_to_num(0.0)
        self.bad += self.optimizer.found_inf

    def update(self, shape: int, source: Tensor, target: Tensor) -> None:
        """Make one update, of [B, T] each."""
        self.seen[shape] = self.seen.get(shape, 0) + 1
        if self.device.type != "cuda":
            return self._update(source, target)
        if shape not in self.graphs:
            if self.seen[shape] <= 2:  # libraries choose and allocate before anything is recorded
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    self._update(source, target)
                torch.cuda.current_stream().wait_stream(stream)
                return None
            graph = torch.cuda.CUDAGraph()
            inputs = (source.clone(), target.clone())
            with torch.cuda.graph(graph, pool=self.pool):
                self._update(*inputs)
            self.graphs[shape] = (graph, *inputs)
        graph, kept_source, kept_target = self.graphs[shape]
        kept_source.copy_(source)
        kept_target.copy_(target)
        graph.replay()
        return None


@torch.no_grad()
def validate(model: TransformerModel, corpus: Corpus, tokens: int) -> float:
    """Compute the loss per token, without smoothing."""
    total = count = 0.0
    for shape, sentences in corpus.batches(tokens):
        loss, number = loss_of(
            model, corpus.source.gather(sentences, LENGTHS[shape]), corpus.target.gather(sentences, LENGTHS[shape]), 0.0, 0.0
        )
        total, count = total + float(loss) * int(number), count + int(number)
    return total / count


def endless(corpus: Corpus, tokens: int) -> Iterator[tuple[int, Tensor]]:
    while True:
        yield from corpus.batches(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA_BIN", help="of fairseq-ccpr prepare, with one dictionary for both languages")
    parser.add_argument("-s", "--source-lang", required=True)
    parser.add_argument("-t", "--target-lang", required=True)
    parser.add_argument("--output", type=Path, required=True, help="the checkpoint to write, fp16")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--encoder-layers", type=int, default=6)
    parser.add_argument("--decoder-layers", type=int, default=3)
    parser.add_argument("--embed-dim", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=8192, help="subwords of a batch's side, with padding")
    parser.add_argument("--lr", type=float, default=7e-4)
    parser.add_argument("--warmup", type=int, default=500, help="updates until the learning rate is reached")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    torch.manual_seed(arguments.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dictionary = Dictionary.load(str(arguments.data / f"dict.{arguments.target_lang}.txt"))
    model = build(arguments, dictionary).to(device)
    training, valid = (Corpus(arguments.data / name, arguments, dictionary, device) for name in ("train", "valid"))
    trainer, begun = Trainer(model, arguments, device), time.perf_counter()
    reported, updates = begun, 0
    for updates, (shape, sentences) in enumerate(endless(training, arguments.max_tokens), 1):
        if updates % REPORTED == 1:
            if device.type == "cuda":
                torch.cuda.synchronize()
            passed = (time.perf_counter() - begun) / (60 * arguments.minutes)
            if time.perf_counter() - reported > 10:
                print(f"{passed:.0%}, {updates:,} updates, loss {float(trainer.loss) / done:.3f}, {int(trainer.bad)} skipped", flush=True)
                if int(trainer.bad) > 20 or not math.isfinite(float(trainer.loss)):
                    sys.exit("training diverged: give a lower --lr")
                trainer.loss.zero_()
                reported, done = time.perf_counter(), 0
            if updates == 1:
                done = 0
            if passed >= 1:
                break
        done += 1
        trainer.rate.fill_(arguments.lr * min(updates / arguments.warmup, max(1 - passed, 0.01)))
        trainer.update(shape, training.source.gather(sentences, LENGTHS[shape]), training.target.gather(sentences, LENGTHS[shape]))
    loss = validate(model, valid, arguments.max_tokens)
    print(f"{updates - 1:,} updates of up to {arguments.max_tokens:,} subwords; valid perplexity {math.exp(loss):.2f}", flush=True)
    save(model, arguments)


def build(arguments: argparse.Namespace, dictionary: Dictionary) -> TransformerModel:
    """Make fairseq's model."""
    global TABLE, EOS
    heads = arguments.embed_dim // 64
    settings = Namespace(
        task="translation", data=".", source_lang=arguments.source_lang, target_lang=arguments.target_lang, arch="transformer",
        criterion="label_smoothed_cross_entropy", encoder_layers=arguments.encoder_layers, decoder_layers=arguments.decoder_layers,
        encoder_embed_dim=arguments.embed_dim, decoder_embed_dim=arguments.embed_dim,
        encoder_ffn_embed_dim=4 * arguments.embed_dim, decoder_ffn_embed_dim=4 * arguments.embed_dim,
        encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_normalize_before=True, decoder_normalize_before=True,
        share_all_embeddings=True, max_source_positions=256, max_target_positions=256, dropout=arguments.dropout,
    )  # fmt: skip
    base_architecture(settings)
    model = TransformerModel.build_model(settings, Namespace(source_dictionary=dictionary, target_dictionary=dictionary))
    model.args = settings
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    places = model.encoder.embed_positions
    TABLE, EOS = places.get_embedding(LENGTHS[-1] + dictionary.pad() + 2, arguments.embed_dim, dictionary.pad()).to(device), dictionary.eos()
    return model


def save(model: TransformerModel, arguments: argparse.Namespace) -> None:
    """Write the checkpoint, weights that are shared once."""
    halves: dict[int, Tensor] = {}
    state = model.state_dict()
    for value in state.values():
        halves.setdefault(value.data_ptr() or id(value), value.half().cpu())
    weights = {name: halves[value.data_ptr() or id(value)] for name, value in state.items()}
    with atomic_file(arguments.output) as path:
        torch.save(as_checkpoint(model.args, weights, "LabelSmoothedCrossEntropyCriterion"), path)


if __name__ == "__main__":
    main()
