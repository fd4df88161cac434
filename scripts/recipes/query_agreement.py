"""How well a query head imitates its phrase encoder: on which phrases, vectors and strings both agree.

python scripts/recipes/query_agreement.py DATA_BIN MODEL DATASTORE HEAD SOURCE

DATA_BIN is what fairseq-ccpr prepare wrote for the translation model MODEL, DATASTORE a phrase datastore, whose settings
count, and HEAD a checkpoint of fairseq-train --task phrase_queries. Printed is, of the phrases that the phrase encoder finds
in the text SOURCE: how many the head finds, and of those the mean cosine of both vectors, how many of the nearest strings are
the same, and how often the first.
"""

import sys
from pathlib import Path
from statistics import mean

import torch

from fairseq_ccpr import Translator
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever
from fairseq_ccpr.text.pairs import read_lines

Span = tuple[int, int, int]  # sentence, start, end


def main() -> None:
    if len(sys.argv) != 6:
        sys.exit(__doc__.strip())
    data, model, datastore, head, source = sys.argv[1:]
    translator = Translator(model, data=data, datastore=datastore, phrase_queries=head, device="cpu")
    ours = translator.find_memory("phrases").candidates.retriever
    settings = ours.finder.segmentation, ours.k, ours.min_similarity, ours.device
    theirs = PhraseRetriever(ours.datastore, ours.encoder, *settings)
    texts = list(read_lines(Path(source)))
    of_head, of_encoder = (found(one, texts) for one in (ours, theirs))
    both = sorted(of_head.keys() & of_encoder.keys())
    if not both:
        sys.exit(f"of {len(of_encoder):,} phrases that the phrase encoder finds, the head finds none: give more text")
    strings = [(of_head[span][1], of_encoder[span][1]) for span in both if of_encoder[span][1]]
    if not strings:
        sys.exit(f"the phrase encoder retrieves nothing for {len(both):,} phrases: give text of the datastore's domain")
    cosines = (torch.cosine_similarity(of_head[span][0], of_encoder[span][0], dim=0) for span in both)
    print(f"phrases found by the head: {len(both) / len(of_encoder):.0%} of {len(of_encoder):,}")
    print(f"phrases that only the head finds: {len(of_head) - len(both):,}")
    print(f"cosine of the vectors: {mean(map(float, cosines)):.2f}")
    print(f"of {ours.k} strings, the same: {mean(len({*a} & {*b}) / len(b) for a, b in strings):.0%}")
    print(f"the same first string: {mean(a[:1] == b[:1] for a, b in strings):.0%}")


def found(retriever: PhraseRetriever, texts: list[str]) -> dict[Span, tuple]:
    phrases = retriever.finder.find(texts)
    queries = [one for sentence in retriever.retrieve(texts) for one in sentence]
    return {
        (number, start, end): (vector, [one.string for one in query.retrieved])
        for (number, start, end), vector, query in zip(phrases.spans.tolist(), phrases.vectors, queries, strict=True)
    }


if __name__ == "__main__":
    main()
