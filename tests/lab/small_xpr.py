"""What XPR is trained on, and untrained encoders of it."""

from __future__ import annotations

import torch

from fairseq_ccpr.lab.xpr.lexicon import Lexicon
from fairseq_ccpr.lab.xpr.model import TrainedXprEncoder
from fairseq_ccpr.lab.xpr.training import LexiconDataset
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder
from fairseq_ccpr.text.tokenizers import load_tokenizer
from tests.small_models import Xpr


def make_dataset(
    xpr: Xpr, split: str = "train", sentences: int = 3, max_subwords: int = 60
) -> LexiconDataset:
    return LexiconDataset(
        [Lexicon(xpr.lexicon / split)], load_tokenizer(xpr.context), sentences, max_subwords, 1
    )


def make_model(xpr: Xpr, momentum: float = 0.9, queue: int = 0, dimension: int = 16) -> TrainedXprEncoder:
    torch.manual_seed(1)
    context = ContextEncoder.load(xpr.context, dropout=0.0)
    return TrainedXprEncoder(context, context.layers, dimension, momentum, queue).train()
