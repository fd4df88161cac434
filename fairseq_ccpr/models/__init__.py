"""Networks: the phrase encoders of CCPR and XPR, the adapter of CLKNN, Marian's Transformer, and where keys are read.

Importing the room registers them with fairseq.
"""

from fairseq_ccpr.models import marian, phrase_encoder, token_adapter, xpr_encoder

__all__ = ["marian", "phrase_encoder", "token_adapter", "xpr_encoder"]
