"""A plug-in of your own on top of fairseq_ccpr: another policy for how much retrieval counts.

    fairseq-generate DATA_BIN --user-dir user_dir --task translation_agreement --datastore DIR ...

The weight of the datastore is lambda where all neighbours name the same token, and less the more they disagree. The tuner
scores its grid with the same policy, and the explanation shows it.
"""

from fairseq.tasks import register_task
from torch import Tensor

from fairseq_ccpr import ModelView, TokenRetrievalSettings, TranslationRetrievalConfig, TranslationRetrievalTask


def agreement_weight(scores: Tensor, values: Tensor, model: ModelView, settings: TokenRetrievalSettings) -> Tensor:
    """lambda times the largest fraction of the k neighbours that name one token, fp32 [N]; a missing one agrees with none.

    Args:
        scores, values: fp32 and int64 [N, k], the neighbours' scores, -inf where one is missing, and their tokens.
        model: what the model says of those tokens; not needed here.
        settings: the `--knn-*` options.
    """
    found = scores > float("-inf")
    same = (values.unsqueeze(2) == values.unsqueeze(1)) & found.unsqueeze(1)  # [N, k, k]
    votes = same.sum(dim=2).masked_fill(~found, 0).amax(dim=1)
    return settings.lambda_ * votes / values.size(1)


@register_task("translation_agreement", dataclass=TranslationRetrievalConfig)
class TranslationAgreementTask(TranslationRetrievalTask):
    """`translation_retrieval` with that policy."""

    token_weight = staticmethod(agreement_weight)
