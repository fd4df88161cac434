"""kNN-MT in sixty lines: p = (1 - λ) p_NMT + λ p_kNN. From the repository: python examples/knn_mt.py [TSV SENTENCE]

Each `->` names the file of fairseq_ccpr that does the same for millions of entries.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
import fairseq_ccpr  # noqa: F401, no checkpoint runs code from here on
from fairseq.models.transformer import TransformerModel

DEMO = "datastores/demo"
K, TEMPERATURE, WEIGHT = 8, 10.0, 0.6  # k, T and λ -> decoding/options.py, evaluation/tune.py
TSV, SENTENCE = sys.argv[1:] or (f"{DEMO}/verses.tsv", "Jesus aber sprach zu ihnen: Was hat Moses geboten?")

# The model, as fairseq loads it -> models/checkpoint.py, inference/system.py
hub = TransformerModel.from_pretrained(DEMO, bpe="sentencepiece", sentencepiece_model=f"{DEMO}/spm.model")
model, end = hub.models[0], hub.tgt_dict.eos()


def encode(text: str, dictionary: Any) -> Tensor:
    """Cut a sentence into subwords, int64 [1, L], </s> being the last -> inference/system.py."""
    return dictionary.encode_line(hub.apply_bpe(text), add_if_not_exist=False).long()[None]


def states(source: Tensor, prefix: Tensor) -> Tensor:
    """Compute the decoder's states h, [L, d], each of which predicts the next token -> models/key_layer.py."""
    encoded = model.encoder(source, torch.tensor([source.size(1)]))
    return model.decoder(prefix, encoder_out=encoded, features_only=True)[0][0]


def build(pairs: list[list[str]]) -> tuple[Tensor, Tensor]:
    """Force-decode all pairs: states are the keys, the tokens they predict the values -> building/token_build.py."""
    targets = [encode(target, hub.tgt_dict) for _, target in pairs]
    prefixes = [
        tokens.roll(1) for tokens in targets
    ]  # </s> y1 ... yn, and so to be predicted is y1 ... yn </s>
    keys = [states(encode(source, hub.src_dict), prefix) for (source, _), prefix in zip(pairs, prefixes)]
    return torch.cat(keys), torch.cat(targets, dim=1)[0]  # kept on disk -> datastore/token.py


def vote(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute p_kNN, [V]: the nearest neighbours of a state [1, d] vote for their tokens."""
    distances, entries = (
        torch.cdist(query, keys)[0].square().topk(K, largest=False)
    )  # -> search/, token_memory.py
    shares = torch.softmax(-distances / TEMPERATURE, dim=0)  # -> decoding/mixture.py
    return torch.zeros(len(hub.tgt_dict)).index_add(0, values[entries], shares)  # of equal tokens the sum


def translate(sentence: str, datastore: tuple[Tensor, Tensor], weight: float) -> str:
    """Take the likeliest token until the sentence ends; beam search is fairseq's -> decoding/ensemble.py."""
    source, prefix = encode(sentence, hub.src_dict), torch.tensor([[end]])
    while prefix.size(1) < 100:
        query = states(source, prefix)[-1:]
        p_nmt = model.decoder.output_layer(query).softmax(dim=1)[0]
        token = ((1 - weight) * p_nmt + weight * vote(query, *datastore)).argmax()  # -> decoding/mixture.py
        if token == end:
            break
        prefix = torch.cat([prefix, token.view(1, 1)], dim=1)
    return hub.decode(prefix[0, 1:])


with torch.inference_mode():
    datastore = build([line.split("\t") for line in Path(TSV).read_text(encoding="utf-8").splitlines()])
    for name, weight in {
        "model": 0.0,
        "kNN-MT": WEIGHT,
    }.items():  # λ at every token by trust -> decoding/trust.py
        print(f"{name:10} {translate(SENTENCE, datastore, weight)}")
