"""Train a fairseq Transformer on one GPU for as many minutes as there are.

python scripts/recipes/train_on_gpu.py DATA_BIN -s de -t en --output model.pt --minutes 8

DATA_BIN is a folder of `fairseq-ccpr prepare` with one dictionary for both languages; -s en -t de trains the opposite
direction from it. All sentences lie on the GPU. Those of similar length form batches of a few shapes, and an update of each
shape is one CUDA graph, so that nothing waits for the host: on an H100, two models of the default size at once read 128,000
target tokens a second each. Products are bf16; weights and sums are fp32. The learning rate rises for --warmup updates,
then falls to 0 as the minutes pass. Training ends where gradients are no numbers again and again. The checkpoint is one of
fairseq's, with layers that are normalised before (--encoder-normalize-before).
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary, data_utils
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer.transformer_legacy import base_architecture
from torch import Tensor
from torch.nn import functional

from fairseq_ccpr.models.checkpoint import as_checkpoint
from fairseq_ccpr.storage.files import atomic_file

LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128)  # subwords of a batch's sentences; longer pairs are left out
BETAS, EPSILON, CLIP = (0.9, 0.98), 1e-8, 1.0
CHECKED, REPORTED, SKIPPED = (
    10,
    10.0,
    20,
)  # updates from look to look, seconds from line to line, updates that may fail
WARM_UP = 2  # updates of a shape before its graph: libraries choose and allocate


class Side:
    """One side of the sentences, on the device."""

    def __init__(self, prefix: str, dictionary: Dictionary, device: torch.device) -> None:
        dataset = data_utils.load_indexed_dataset(prefix, dictionary, "mmap")
        self.lengths = np.array(dataset.sizes, dtype=np.int64)
        tokens = np.fromfile(f"{prefix}.bin", dtype=dataset._index.dtype).astype(np.int32)
        starts = np.cumsum(self.lengths) - self.lengths
        self.tokens, self.starts, self.sizes = (
            torch.from_numpy(array).to(device) for array in (tokens, starts, self.lengths)
        )
        self.pad = dictionary.pad()

    def gather(self, sentences: Tensor, length: int) -> Tensor:
        """Collect sentences int64 [B] as int64 [B, length], padded on the right."""
        columns = torch.arange(length, device=sentences.device)
        places = (self.starts[sentences].unsqueeze(1) + columns).clamp_max(len(self.tokens) - 1)
        return self.tokens[places].long().masked_fill(columns >= self.sizes[sentences].unsqueeze(1), self.pad)


class Corpus:
    """Sentence pairs by shape, which is a place in `LENGTHS`."""

    def __init__(
        self,
        data: Path,
        subset: str,
        languages: tuple[str, str],
        dictionary: Dictionary,
        device: torch.device,
    ) -> None:
        pairs = [f"{data}/{subset}.{one}-{other}" for one, other in (languages, languages[::-1])]
        prefix = next((pair for pair in pairs if Path(f"{pair}.{languages[0]}.bin").is_file()), None)
        if prefix is None:
            sys.exit(
                f"{data} has no {subset}.{'-'.join(languages)}: give a folder of fairseq-ccpr prepare, and its -s and -t"
            )
        self.source, self.target = (
            Side(f"{prefix}.{language}", dictionary, device) for language in languages
        )
        shapes = np.searchsorted(LENGTHS, np.maximum(self.source.lengths, self.target.lengths))
        members = {shape: np.flatnonzero(shapes == shape) for shape in range(len(LENGTHS))}
        self.members = {
            shape: torch.from_numpy(found).to(device) for shape, found in members.items() if len(found)
        }
        if not self.members:
            sys.exit(f"{data}: {subset} has no pair of at most {LENGTHS[-1]} subwords: give other data")

    def batches(self, tokens: int, fill: bool = True) -> list[tuple[int, Tensor]]:
        """Shuffle the pairs into batches: (shape, sentences int64 [B]).

        Args:
            fill: whether the last batch of a shape repeats others to be as large as the rest, as a graph needs it.
        """
        batches = []
        for shape, members in self.members.items():
            rows = max(tokens // LENGTHS[shape], 1)
            order = members[torch.randperm(len(members), device=members.device)]
            if fill:
                whole = -(-len(order) // rows) * rows
                order = order.repeat(-(-whole // len(order)))[:whole]
            batches += [(shape, part) for part in order.split(rows)]
        random.shuffle(batches)
        return batches

    def pair(self, shape: int, sentences: Tensor) -> tuple[Tensor, Tensor]:
        """Collect both sides of a batch, int64 [B, T] each."""
        return self.source.gather(sentences, LENGTHS[shape]), self.target.gather(sentences, LENGTHS[shape])


class Network:
    """fairseq's Transformer, computed by few operations: with its weights, and without dropout to the same values."""

    def __init__(self, model: TransformerModel, dropout: float, products: torch.dtype) -> None:
        self.model, self.dropout, self.products = model, dropout, products
        self.pad, self.width = model.encoder.padding_idx, model.encoder.embed_tokens.embedding_dim
        self.heads = model.encoder.layers[0].self_attn.num_heads
        table = model.encoder.embed_positions.get_embedding(LENGTHS[-1] + self.pad + 1, self.width, self.pad)
        self.positions = table.to(model.encoder.embed_tokens.weight.device)

    def states(self, source: Tensor, previous: Tensor) -> Tensor:
        """Compute what is projected to the vocabulary, [B, T, C], for int64 [B, S] and [B, T], padded on the right."""
        seen = source.ne(self.pad)
        mask = seen[:, None, None]
        x = self._embed(source) * seen.unsqueeze(2)
        for layer in self.model.encoder.layers:
            h = self._norm(layer.self_attn_layer_norm, x)
            x = self._feed(layer, x + self._attend(layer.self_attn, h, h, mask))
        memory = self._norm(self.model.encoder.layer_norm, x)
        x = self._embed(previous)
        for layer in self.model.decoder.layers:
            h = self._norm(layer.self_attn_layer_norm, x)
            x = x + self._attend(layer.self_attn, h, h, None)
            h = self._norm(layer.encoder_attn_layer_norm, x)
            x = self._feed(layer, x + self._attend(layer.encoder_attn, h, memory, mask))
        return self._norm(self.model.decoder.layer_norm, x)

    def loss(self, source: Tensor, target: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        """Compute the loss per token and the number of tokens. Targets end in </s>, which is also what they begin after."""
        end = self.model.decoder.dictionary.eos()
        previous = torch.cat([torch.full_like(target[:, :1], end), target[:, :-1]], dim=1)
        states = self.states(source, previous.masked_fill(target.eq(self.pad), self.pad))
        logits = self._cast(self.model.decoder.output_projection.weight)
        total = functional.cross_entropy(
            functional.linear(states, logits).flatten(0, 1).float(), target.flatten(), ignore_index=self.pad,
            label_smoothing=smoothing, reduction="sum",
        )  # fmt: skip
        number = target.ne(self.pad).sum()
        return total / number, number

    def _cast(self, weights: Tensor) -> Tensor:
        return weights.to(self.products)

    def _linear(self, layer: Any, x: Tensor) -> Tensor:
        return functional.linear(x, self._cast(layer.weight), self._cast(layer.bias))

    def _norm(self, layer: Any, x: Tensor) -> Tensor:
        return self._cast(
            functional.layer_norm(x, layer.normalized_shape, layer.weight, layer.bias, layer.eps)
        )

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x.float(), self.dropout, self.dropout > 0)

    def _embed(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.size(1), device=tokens.device) + self.pad + 1
        embedded = functional.embedding(tokens, self.model.encoder.embed_tokens.weight) * math.sqrt(
            self.width
        )
        return self._drop(embedded + self.positions[torch.where(tokens.ne(self.pad), places, self.pad)])

    def _attend(self, weights: Any, query: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        inputs = (query, weights.q_proj), (memory, weights.k_proj), (memory, weights.v_proj)
        q, k, v = (
            self._linear(layer, x).unflatten(2, (self.heads, -1)).transpose(1, 2) for x, layer in inputs
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, mask, self.dropout, is_causal=mask is None)
        return self._drop(self._linear(weights.out_proj, mixed.transpose(1, 2).flatten(2)))

    def _feed(self, layer: Any, x: Tensor) -> Tensor:
        hidden = functional.relu(self._linear(layer.fc1, self._norm(layer.final_layer_norm, x)))
        return x + self._drop(self._linear(layer.fc2, hidden))


class Trainer:
    """Updates the weights of a network; on a GPU by a graph for each shape."""

    def __init__(self, network: Network, smoothing: float) -> None:
        self.network, self.smoothing = network, smoothing
        self.parameters = list(network.model.parameters())
        device = self.parameters[0].device
        self.rate, self.loss, self.failed = (torch.zeros((), device=device) for _ in range(3))
        kind = {"weight_decay": 0.0, "fused": True, "capturable": device.type == "cuda"}
        self.optimizer: Any = torch.optim.AdamW(self.parameters, self.rate, BETAS, EPSILON, **kind)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self.seen: dict[int, int] = {}
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def update(self, shape: int, source: Tensor, target: Tensor) -> None:
        """Make one update; adds the loss to `loss`, and to `failed` where the gradient is no number and nothing changes."""
        self.seen[shape] = self.seen.get(shape, 0) + 1
        if self.pool is None:
            self._update(source, target)
            return
        if self.seen[shape] <= WARM_UP:  # on a stream of its own, as recording has
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._update(source, target)
            torch.cuda.current_stream().wait_stream(stream)
            return
        if shape not in self.graphs:
            graph, inputs = torch.cuda.CUDAGraph(), (source.clone(), target.clone())
            with torch.cuda.graph(graph, pool=self.pool):
                self._update(*inputs)
            self.graphs[shape] = (graph, *inputs)
        graph, kept_source, kept_target = self.graphs[shape]
        kept_source.copy_(source)
        kept_target.copy_(target)
        graph.replay()

    def _update(self, source: Tensor, target: Tensor) -> None:
        loss, _ = self.network.loss(source, target, self.smoothing)
        gradients = torch.autograd.grad(loss, self.parameters)
        for parameter, gradient in zip(self.parameters, gradients):
            parameter.grad = gradient
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        # As with fp16 losses: the fused step divides gradients by the scale, and is left out where one was infinite.
        self.optimizer.grad_scale, self.optimizer.found_inf = (
            (norm / CLIP).clamp_min(1.0),
            (~norm.isfinite()).float(),
        )
        self.optimizer.step()
        self.loss += loss.detach().nan_to_num(0.0, 0.0, 0.0)
        self.failed += self.optimizer.found_inf


def train(trainer: Trainer, corpus: Corpus, settings: argparse.Namespace) -> int:
    """Train until the minutes have passed; returns the number of updates."""

    def endless() -> Iterator[tuple[int, Tensor]]:
        while True:
            yield from corpus.batches(settings.max_tokens)

    begun = reported = time.perf_counter()
    since, passed = 0, 0.0
    for updates, (shape, sentences) in zip(count(), endless()):
        if updates % CHECKED == 0:
            total, failed = float(trainer.loss), int(trainer.failed)  # waits for the updates
            now = time.perf_counter()
            passed = (now - begun) / (60 * settings.minutes)
            if failed > SKIPPED:
                sys.exit(
                    f"{failed} of {updates:,} updates had gradients that are no numbers: give a lower --lr"
                )
            if now - reported > REPORTED or passed >= 1:
                print(
                    f"{passed:.0%}, {updates:,} updates, loss {total / max(since, 1):.3f}, {failed} left out",
                    flush=True,
                )
                trainer.loss.zero_()
                since, reported = 0, now
            if passed >= 1:
                break
        trainer.rate.fill_(settings.lr * min((updates + 1) / settings.warmup, 1 - passed))
        trainer.update(shape, *corpus.pair(shape, sentences))
        since += 1
    return updates


@torch.no_grad()
def perplexity(network: Network, corpus: Corpus, tokens: int) -> float:
    """Compute the perplexity of a corpus, without dropout."""
    network.dropout, total, tokens_seen = 0.0, 0.0, 0
    for shape, sentences in corpus.batches(tokens, fill=False):
        loss, number = network.loss(*corpus.pair(shape, sentences), 0.0)
        total, tokens_seen = total + float(loss) * int(number), tokens_seen + int(number)
    return math.exp(total / tokens_seen)


def build(settings: argparse.Namespace, dictionary: Dictionary) -> tuple[TransformerModel, Namespace]:
    """Make fairseq's model, and the options that make it again."""
    width, heads = settings.embed_dim, settings.embed_dim // 64
    options = Namespace(
        task="translation", data=".", source_lang=settings.source_lang, target_lang=settings.target_lang, arch="transformer",
        criterion="label_smoothed_cross_entropy", encoder_layers=settings.encoder_layers, encoder_embed_dim=width,
        encoder_ffn_embed_dim=4 * width, encoder_attention_heads=heads, encoder_normalize_before=True,
        decoder_layers=settings.decoder_layers, decoder_embed_dim=width, decoder_ffn_embed_dim=4 * width,
        decoder_attention_heads=heads, decoder_normalize_before=True, share_all_embeddings=True, dropout=settings.dropout,
        attention_dropout=settings.dropout,
        max_source_positions=256, max_target_positions=256,
    )  # fmt: skip
    base_architecture(options)
    task = Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return TransformerModel.build_model(options, task), options


def save(model: TransformerModel, options: Namespace, output: Path) -> None:
    """Write a checkpoint in fp16; weights that are shared are stored once."""
    halves: dict[int, Tensor] = {}
    state = {name: (value.data_ptr() or id(value), value) for name, value in model.state_dict().items()}
    for place, value in state.values():
        halves.setdefault(place, value.half().cpu())
    weights = {name: halves[place] for name, (place, _) in state.items()}
    with atomic_file(output) as path:
        torch.save(as_checkpoint(options, weights, "LabelSmoothedCrossEntropyCriterion"), path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, metavar="DATA_BIN")
    parser.add_argument("-s", "--source-lang", required=True)
    parser.add_argument("-t", "--target-lang", required=True)
    parser.add_argument("--output", type=Path, required=True, help="the checkpoint to write")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--encoder-layers", type=int, default=6)
    parser.add_argument("--decoder-layers", type=int, default=3)
    parser.add_argument("--embed-dim", type=int, default=512, help="a multiple of 64, the width of a head")
    parser.add_argument(
        "--max-tokens", type=int, default=8192, help="subwords of one side of a batch, with padding"
    )
    parser.add_argument("--lr", type=float, default=7e-4)
    parser.add_argument("--warmup", type=int, default=500, help="updates until the learning rate is reached")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    settings = parser.parse_args()
    if settings.embed_dim < 64 or settings.embed_dim % 64:
        parser.error(f"--embed-dim {settings.embed_dim} is no multiple of 64, the width of a head")
    random.seed(settings.seed)
    torch.manual_seed(settings.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    languages = settings.source_lang, settings.target_lang
    if missing := [name for name in languages if not (settings.data / f"dict.{name}.txt").is_file()]:
        sys.exit(
            f"{settings.data} has no dict.{missing[0]}.txt: give a folder of fairseq-ccpr prepare, and its -s and -t"
        )
    dictionaries = [Dictionary.load(str(settings.data / f"dict.{language}.txt")) for language in languages]
    if dictionaries[0] != dictionaries[1]:
        sys.exit(
            f"{settings.data} has two dictionaries, and this recipe shares all embeddings: prepare the data with a joint one"
        )
    model, options = build(settings, dictionaries[1])
    network = Network(
        model.to(device), settings.dropout, torch.bfloat16 if device.type == "cuda" else torch.float32
    )
    training, valid = (
        Corpus(settings.data, name, languages, dictionaries[1], device) for name in ("train", "valid")
    )
    updates = train(Trainer(network, settings.label_smoothing), training, settings)
    found = perplexity(network, valid, settings.max_tokens)
    save(model, options, settings.output)
    print(
        f"{settings.output}: {updates:,} updates of up to {settings.max_tokens:,} subwords, valid perplexity {found:.2f}"
    )


if __name__ == "__main__":
    main()
