"""fairseq-ccpr: retrieval-augmented machine translation as a fairseq plug-in (`--user-dir fairseq_ccpr`)."""

import logging
import os
from argparse import Namespace

from fairseq_ccpr.errors import ConfigurationError, install_report

install_report()  # before the imports, which take seconds and may be interrupted

import torch  # noqa: E402

from fairseq_ccpr.version import __version__  # noqa: E402

# fairseq announces on import which packages it could use for speech; hydra and matplotlib, each step they take.
for name in ("fairseq.tasks.text_to_speech", "hydra", "matplotlib"):
    logging.getLogger(name).setLevel(logging.WARNING)

# fairseq keeps its settings in checkpoints as a Namespace. Naming that one class lets torch load them with
# weights_only on, so that nothing in a checkpoint can run.
torch.serialization.add_safe_globals([Namespace])
# fairseq's main branch passes weights_only=False to torch.load. This torch switch overrides callers, here and in child
# processes. torch refuses it together with its opposite. That one allows what this package rules out, but is not dropped
# silently: other code in the process may rely on it.
if os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0").lower() in ("1", "y", "yes", "true"):
    raise ConfigurationError(
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set in the environment, which lets checkpoints run code: unset it, as "
        "fairseq-ccpr reads nothing but tensors and plain settings from them"
    )
os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"

# Importing what is public also registers tasks, models and criterions with fairseq.
from fairseq_ccpr import models, training  # noqa: E402
from fairseq_ccpr.datastore.phrase import PhraseDatastore  # noqa: E402
from fairseq_ccpr.datastore.token import TokenDatastore  # noqa: E402
from fairseq_ccpr.decoding.language_tags import LanguageTags  # noqa: E402
from fairseq_ccpr.decoding.memory import LearningRetriever, Memory, ModelView, Neighbours, Retriever  # noqa: E402
from fairseq_ccpr.decoding.options import PhraseSettings, TokenRetrievalSettings, TranslationRetrievalConfig  # noqa: E402
from fairseq_ccpr.decoding.retrieval_task import RetrievalTask  # noqa: E402
from fairseq_ccpr.decoding.task import TranslationRetrievalTask  # noqa: E402
from fairseq_ccpr.decoding.token_retriever import TokenRetriever  # noqa: E402
from fairseq_ccpr.decoding.trust import Decision, Trust, TrustStep  # noqa: E402
from fairseq_ccpr.inference.hub import refuse_retrieval_by_hub  # noqa: E402
from fairseq_ccpr.inference.sentences import Translation  # noqa: E402
from fairseq_ccpr.lab import xpr  # noqa: E402, F401 - registered
from fairseq_ccpr.translator import Translator  # noqa: E402

refuse_retrieval_by_hub()

__all__ = [
    "Decision",
    "LanguageTags",
    "LearningRetriever",
    "Memory",
    "ModelView",
    "Neighbours",
    "PhraseDatastore",
    "PhraseSettings",
    "RetrievalTask",
    "Retriever",
    "TokenDatastore",
    "TokenRetrievalSettings",
    "TokenRetriever",
    "Translation",
    "TranslationRetrievalConfig",
    "TranslationRetrievalTask",
    "Translator",
    "Trust",
    "TrustStep",
    "__version__",
    "models",
    "training",
]
