"""Whether keys for target-language text can be made without a reverse model, by a map into what the decoder attends to.

python scripts/recipes/keys_without_source.py MODEL ENCODER GENERAL.tsv TRAIN.tsv BACK.tsv TEST.tsv

A key is the decoder's state under a source sentence, and text of the target language alone has none. A map turns the states
that the phrase encoder ENCODER computes of the *target* sentence into the place of the translation model's encoder output:

fitted   linear, by least squares over the words of the *source* sentences of GENERAL.tsv (source TAB target) in both encoders
trained  starts there, with `--layers` of a Transformer added, and lets the decoder's states come near those under the true
         source: squared distance in units of their variance, plus `--contrast` times the cross-entropy of finding the own
         state among all tokens of the batch, for `--minutes` of CPU time

Printed are precision@8 (of the 8 nearest keys, how many have the true token) and any-hit@8 in percent, for the decoder's
states of the pairs of TEST.tsv. The keys are of the same sentences of TRAIN.tsv under the true source, the back-translation
in BACK.tsv (back-translation TAB target), the target sentence itself, and each map; last, their distance from the true keys.
"""
# ruff: noqa: E731

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fairseq.data.data_utils import collate_tokens
from torch import Tensor, nn

from fairseq_ccpr import Translator
from fairseq_ccpr.inference.system import encode, encode_with
from fairseq_ccpr.models.phrase_encoder import load_phrase_encoder
from fairseq_ccpr.search import ExactIndex
from fairseq_ccpr.search.recall import any_hit_at_k, matching_neighbours, precision_at_k
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.text.subwords import collate

PAIRS, FITTED, SENTENCES, TESTED, ASKED = 10000, 1500, 1500, 500, 5000  # of GENERAL, of TRAIN, of TEST; queries
K, LONGEST, BATCH, TEMPERATURE, RATE = 8, 40, 1000, 0.1, 1e-3  # neighbours, words of a sentence, tokens of a batch


class Map(nn.Module):
    """From the phrase encoder's states [B, L, H] to those that the decoder attends to, [B, L, d]."""

    def __init__(self, start: Tensor, layers: int) -> None:
        super().__init__()
        width = start.size(1)
        self.start, self.noise, self.out = nn.Linear(len(start) - 1, width), nn.Dropout(0.1), nn.Linear(width, width)
        self.start.weight.data, self.start.bias.data = start[:-1].T.contiguous(), start[-1]
        nn.init.zeros_(self.out.weight), nn.init.zeros_(self.out.bias)
        layer = nn.TransformerEncoderLayer(width, 4, 1024, 0.1, "gelu", batch_first=True, norm_first=True)
        self.mix = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False) if layers else None

    def forward(self, states: Tensor, padding: Tensor) -> Tensor:
        if self.training:  # whole positions, too: the key of a token must not be read from that token alone
            states = self.noise(states * (torch.rand(states.shape[:2]) > 0.1).unsqueeze(2))
        found = self.start(states)
        return found if self.mix is None else found + self.out(self.mix(found, src_key_padding_mask=padding))


class Laboratory:
    """The two models, and what they compute of texts."""

    def __init__(self, model: Path, encoder: Path) -> None:
        translator, self.phrases = Translator(model, device="cpu"), load_phrase_encoder(encoder)
        self.task, self.model = translator.task, translator.models[0].requires_grad_(False)
        self.tokenizer, self.dictionary = self.phrases.context.tokenizer, self.task.target_dictionary

    def tokens(self, texts: list[str]) -> list[Tensor]:
        return [encode_with(text, (self.task.tokenizer, self.task.bpe), self.dictionary) for text in texts]

    def encode(self, tokens: list[Tensor]) -> Any:
        return self.model.encoder(collate_tokens(tokens, self.dictionary.pad()), torch.tensor([*map(len, tokens)]))

    def decode(self, targets: list[Tensor], encoded: Any) -> Tensor:
        previous = collate_tokens(targets, self.dictionary.pad(), self.dictionary.eos(), move_eos_to_beginning=True)
        return self.model.decoder(previous, encoder_out=encoded, features_only=True)[0]

    def keys(self, sources: list[str], targets: list[Tensor]) -> list[Tensor]:
        """Force-decode targets [T] under sources, [T, d] each."""
        ids = [encode(source, self.task) for source in sources]
        compute = lambda rows: self.decode([targets[r] for r in rows], self.encode([ids[r] for r in rows]))
        return in_batches(compute, [max(map(len, both)) for both in zip(ids, targets)], [*map(len, targets)])

    def phrase_states(self, texts: list[str]) -> list[Tensor]:
        ids = [self.tokenizer.encode(text) for text in texts]
        compute = lambda rows: self.phrases.states(collate([ids[r] for r in rows], self.tokenizer.pad))
        return in_batches(compute, [len(one.ids) for one in ids])

    def fit(self, sources: list[str]) -> Tensor:
        """Fit the translation model's encoder to the phrase encoder, word by word, [H + 1, d]: weights and bias."""
        ids, inputs, wanted = [encode(source, self.task) for source in sources], [], []
        compute = lambda rows: self.encode([ids[r] for r in rows])["encoder_out"][0].transpose(0, 1)
        outputs = in_batches(compute, [*map(len, ids)])
        for source, tokens, states, output in zip(sources, ids, self.phrase_states(sources), outputs):
            left = by_word([self.tokenizer.dictionary[i] for i in self.tokenizer.encode(source).ids[1:]], states[1:])
            right = by_word([self.task.source_dictionary[i] for i in tokens.tolist()], output)
            if len(left) == len(right):
                inputs.append(nn.functional.pad(left, (0, 1), value=1.0))
                wanted.append(right)
        x, y = torch.cat(inputs), torch.cat(wanted)
        return torch.linalg.solve(x.T @ x + torch.eye(x.size(1)), x.T @ y)

    def mapped(self, model: Map, states: list[Tensor], targets: list[Tensor]) -> Tensor:
        lengths = torch.tensor([*map(len, states)])
        padding = torch.arange(int(lengths.max())) >= lengths.unsqueeze(1)
        memory = model(nn.utils.rnn.pad_sequence(states, batch_first=True).float(), padding).transpose(0, 1)
        return self.decode(targets, {"encoder_out": [memory], "encoder_padding_mask": [padding]})

    def train(self, model: Map, pairs: list[tuple[str, str]], minutes: float, contrast: float) -> None:
        sources, texts = ([pair[side] for pair in pairs] for side in (0, 1))
        targets, states = self.tokens(texts), self.phrase_states(texts)
        truths, batched = self.keys(sources, targets), batches([*map(len, targets)])
        optimizer, variance = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98)), torch.cat(truths).float().var(0)
        updates, started = 0, time.process_time()
        while (passed := (time.process_time() - started) / 60 / minutes) < 1:
            optimizer.param_groups[0]["lr"] = RATE * min((updates + 1) / 50, 1.02 - passed)
            rows = random.choice(batched)
            tokens, truth = torch.cat([targets[r] for r in rows]), torch.cat([truths[r] for r in rows]).float()
            found = self.mapped(model.train(), [states[r] for r in rows], [targets[r] for r in rows])
            found = torch.cat([one[: len(targets[r])] for one, r in zip(found, rows)])
            scores = nn.functional.normalize(found) @ nn.functional.normalize(truth).T / TEMPERATURE
            others = (tokens.unsqueeze(1) == tokens).fill_diagonal_(False)  # of the same token: no negatives
            crossed = nn.functional.cross_entropy(scores.masked_fill(others, -torch.inf), torch.arange(len(tokens)))
            optimizer.zero_grad()
            ((found - truth).square().mean() / variance.mean() + contrast * crossed).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            updates += 1
        print(f"{updates} updates, {updates / len(batched):.1f} passes", flush=True)


def by_word(pieces: list[str], states: Tensor) -> Tensor:
    """Average the states of each word, and of the end of the sentence."""
    numbers = torch.tensor([piece.startswith("\u2581") or piece == "</s>" for piece in pieces]).cumsum(0)
    sums = torch.zeros(int(numbers[-1]) + 1, states.size(1)).index_add(0, numbers, states.float())
    return (sums / numbers.bincount().clamp_min(1).unsqueeze(1))[1:]


def batches(lengths: list[int]) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if found[-1] and (len(found[-1]) + 1) * lengths[row] > BATCH:
            found.append([])
        found[-1].append(row)
    return found


@torch.no_grad()
def in_batches(compute: Callable[[list[int]], Tensor], sizes: list[int], kept: list[int] | None = None) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for rows in batches(sizes):
        found.update((row, states[: (kept or sizes)[row]].half()) for row, states in zip(rows, compute(rows)))
    return [found[row].clone() for row in range(len(sizes))]  # a view would keep its whole batch


def read(path: Path) -> list[tuple[str, str]]:
    """Read the pairs without long sentences, one of each target, in random order."""
    pairs = {t: s for s, t in read_pairs(path) if max(s.count(" "), t.count(" ")) < LONGEST}
    return random.Random(1).sample([(source, target) for target, source in pairs.items()], len(pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "encoder", "general", "train", "back", "test"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--contrast", type=float, default=1.0)
    args = parser.parse_args()
    lab, general, tests = Laboratory(args.model, args.encoder), read(args.general)[:PAIRS], read(args.test)[:TESTED]
    backward = {target: source for source, target in read_pairs(args.back)}
    pairs = [pair for pair in read(args.train) if pair[1] in backward][:SENTENCES]
    texts = [target for _, target in pairs]
    targets, states, asked = lab.tokens(texts), lab.phrase_states(texts), lab.tokens([target for _, target in tests])
    ways = {"true source": lab.keys([source for source, _ in pairs], targets)}
    ways["back-translation"] = lab.keys([backward[target] for target in texts], targets)
    ways["the target itself"] = lab.keys(texts, targets)
    random.seed(1)
    torch.manual_seed(1)
    model = Map(lab.fit([source for source, _ in general[:FITTED]]), args.layers)
    compute = lambda rows: lab.mapped(model.eval(), [states[r] for r in rows], [targets[r] for r in rows])
    ways["map: fitted"] = in_batches(compute, [*map(len, targets)])
    lab.train(model, general, args.minutes, args.contrast)
    ways["map: trained"] = in_batches(compute, [*map(len, targets)])
    values, wanted = torch.cat(targets), torch.cat(asked)
    rows = torch.randperm(len(wanted), generator=torch.Generator().manual_seed(1))
    rows = rows[wanted[rows] != lab.dictionary.eos()][:ASKED]
    queries = torch.cat(lab.keys([source for source, _ in tests], asked))[rows].float()
    print(f"{len(values):,} keys of {len(pairs):,} sentences, {len(rows):,} queries: precision, any-hit, distance")
    for way, found in ways.items():
        keys, truth = torch.cat(found), torch.cat(ways["true source"]).float()
        matches = matching_neighbours(ExactIndex(keys, "l2"), values, queries, wanted[rows], K)
        precision, hit = (100 * f(matches)[:, -1].mean() for f in (precision_at_k, any_hit_at_k))
        distance = (keys.float() - truth).square().mean() / truth.var(dim=0).mean()
        print(f"{way:20} {precision:5.1f}  {hit:5.1f}  {distance:.2f}", flush=True)


if __name__ == "__main__":
    main()
