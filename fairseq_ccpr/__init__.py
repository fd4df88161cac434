"""fairseq-ccpr: retrieval-augmented machine translation as a fairseq plug-in (`--user-dir fairseq_ccpr`)."""

import logging
from argparse import Namespace

import torch

from fairseq_ccpr.errors import install_report
from fairseq_ccpr.version import __version__

# fairseq announces on import which packages it could use for speech; matplotlib, where it looks for its files.
for name in ("fairseq.tasks.text_to_speech", "matplotlib"):
    logging.getLogger(name).setLevel(logging.WARNING)

# fairseq keeps its settings in checkpoints as a Namespace. Naming that one class lets torch load them with
# weights_only on, so that nothing in a checkpoint can run.
torch.serialization.add_safe_globals([Namespace])
install_report()

# Importing them registers them with fairseq.
from fairseq_ccpr.models import (  # noqa: E402
    ccpr_criterion,
    phrase_encoder,
    supervised_contrastive,
    token_adapter,
    xpco_criterion,
    xpr_encoder,
)
from fairseq_ccpr.tasks import (  # noqa: E402
    phrase_contrast,
    phrase_lexicon,
    token_contrast,
    translation_cpu_bf16,
    translation_retrieval,
)

__all__ = [
    "__version__",
    "ccpr_criterion",
    "phrase_contrast",
    "phrase_encoder",
    "phrase_lexicon",
    "supervised_contrastive",
    "token_adapter",
    "token_contrast",
    "translation_cpu_bf16",
    "translation_retrieval",
    "xpco_criterion",
    "xpr_encoder",
]
