"""Networks: the phrase encoders of CCPR and XPR, the adapter of CLKNN, and where a translation model's keys are read.

Importing the room registers them with fairseq.
"""

from fairseq_ccpr.models import phrase_encoder, token_adapter, xpr_encoder

__all__ = ["phrase_encoder", "token_adapter", "xpr_encoder"]
