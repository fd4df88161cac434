"""A plug-in of your own on top of fairseq_ccpr: another policy for how much retrieval counts.

    fairseq-generate DATA_BIN --user-dir user_dir --task translation_agreement --datastore DIR ...

The share of the datastore is lambda where all neighbours name the same token, and less the more they disagree.
"""

from fairseq.tasks import register_task
from torch import Tensor

from fairseq_ccpr import TokenRetriever, TranslationRetrievalConfig, TranslationRetrievalTask


class AgreementRetriever(TokenRetriever):
    """lambda times the largest share of the k neighbours that have one token."""

    def share(self, scores: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        """fp32 [H]; a missing neighbour agrees with none."""
        found = ids >= 0
        same = (values.unsqueeze(2) == values.unsqueeze(1)) & found.unsqueeze(1)  # [H, k, k]
        votes = same.sum(dim=2).masked_fill(~found, 0).amax(dim=1)
        return self.settings.lambda_ * votes / values.size(1)


@register_task("translation_agreement", dataclass=TranslationRetrievalConfig)
class TranslationAgreementTask(TranslationRetrievalTask):
    """`translation_retrieval` with that policy."""

    retriever_class = AgreementRetriever
