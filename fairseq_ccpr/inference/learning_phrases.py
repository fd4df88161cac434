"""The phrases of target sentences that are learnt, as `fairseq-ccpr build phrases` would find them."""

from __future__ import annotations

from collections.abc import Sequence

from fairseq_ccpr.building.phrase_build import without_repeats
from fairseq_ccpr.datastore.pair_phrases import PairPhrases
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.models.phrase_finder import PhraseFinder, Segmentation
from fairseq_ccpr.models.span_encoder import SpanEncoder
from fairseq_ccpr.storage import fingerprint


class PhraseLearner:
    """Segments and encodes target sentences as the text of a phrase datastore was.

    Args:
        datastore: the phrases that others are learnt alongside.
        encoder: its own, where it works.

    Raises:
        ConfigurationError: the file that lists the phrases no longer exists.
        DatastoreError: that file has changed.
    """

    def __init__(self, datastore: PhraseDatastore, encoder: SpanEncoder) -> None:
        segmentation = Segmentation(**datastore.section.segmentation)
        self.finder = PhraseFinder(encoder, segmentation)
        lexicon, wanted = segmentation.lexicon, datastore.section.fingerprints.get("lexicon")
        if lexicon is not None and (found := fingerprint.of_file(lexicon)) != wanted:
            raise DatastoreError(
                f"{lexicon}, which names the phrases of {datastore.directory}, has changed since they were built "
                f"({fingerprint.short(found)}, then {fingerprint.short(str(wanted))}): bring that file back, or build the "
                "phrases again"
            )

    def phrases_of(self, sentences: Sequence[str]) -> list[PairPhrases]:
        """Find the phrases of each sentence; one that is longer than the encoder takes has none."""
        texts = list(sentences)
        found = without_repeats(self.finder.find(texts), texts)
        keys = found.vectors.half().cpu().numpy()
        numbers = found.spans[:, 0]
        return [PairPhrases(found.spans[numbers == n, 1:], keys[numbers == n]) for n in range(len(texts))]
