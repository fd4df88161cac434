"""Networks: phrase encoders of CCPR and XPR, adapters of CLKNN, Marian's Transformer, where keys are read.

Importing this package registers them with fairseq.
"""

from fairseq_ccpr.models import marian, phrase_encoder, token_adapter, xpr_encoder

__all__ = ["marian", "phrase_encoder", "token_adapter", "xpr_encoder"]
