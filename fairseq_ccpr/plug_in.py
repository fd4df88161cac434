"""What this package gives: public names for programs, and for fairseq tasks, models and criterions, which it registers."""

# Every name here without an underscore is one of `fairseq_ccpr`; strict type checkers want it written twice.

import os as _os
from argparse import Namespace as _Namespace
from typing import Any as _Any

import numpy as _np
import torch as _torch

from fairseq_ccpr import models as models
from fairseq_ccpr import training as training
from fairseq_ccpr.datastore.phrase import PhraseDatastore as PhraseDatastore
from fairseq_ccpr.datastore.token import TokenDatastore as TokenDatastore
from fairseq_ccpr.decoding.forced import GivenText as GivenText
from fairseq_ccpr.decoding.forced import Record as Record
from fairseq_ccpr.decoding.forced import VoteRecord as VoteRecord
from fairseq_ccpr.decoding.memory import Memory as Memory
from fairseq_ccpr.decoding.memory import MemoryBatch as MemoryBatch
from fairseq_ccpr.decoding.memory import Snapshot as Snapshot
from fairseq_ccpr.decoding.memory import Step as Step
from fairseq_ccpr.decoding.mixture import Columns as Columns
from fairseq_ccpr.decoding.mixture import Distribution as Distribution
from fairseq_ccpr.decoding.mixture import Evidence as Evidence
from fairseq_ccpr.decoding.mixture import ModelEvidence as ModelEvidence
from fairseq_ccpr.decoding.mixture import ModelView as ModelView
from fairseq_ccpr.decoding.mixture import Vote as Vote
from fairseq_ccpr.decoding.options import PhraseSettings as PhraseSettings
from fairseq_ccpr.decoding.options import TokenRetrievalSettings as TokenRetrievalSettings
from fairseq_ccpr.decoding.options import TranslationRetrievalConfig as TranslationRetrievalConfig
from fairseq_ccpr.decoding.retrieval_task import LanguageTags as LanguageTags
from fairseq_ccpr.decoding.retrieval_task import RetrievalTask as RetrievalTask
from fairseq_ccpr.decoding.task import TranslationRetrievalTask as TranslationRetrievalTask
from fairseq_ccpr.decoding.token_memory import LearningRetriever as LearningRetriever
from fairseq_ccpr.decoding.token_memory import Neighbours as Neighbours
from fairseq_ccpr.decoding.token_memory import Retriever as Retriever
from fairseq_ccpr.decoding.token_memory import TokenMemory as TokenMemory
from fairseq_ccpr.decoding.token_memory import TokenRetriever as TokenRetriever
from fairseq_ccpr.decoding.trust import Decision as Decision
from fairseq_ccpr.decoding.trust import Trust as Trust
from fairseq_ccpr.decoding.trust import TrustStep as TrustStep
from fairseq_ccpr.errors import ConfigurationError as _ConfigurationError
from fairseq_ccpr.inference.resources import refuse_retrieval_by_hub as _refuse_retrieval_by_hub
from fairseq_ccpr.inference.resources import show_options_of_tasks as _show_options_of_tasks
from fairseq_ccpr.inference.system import Translation as Translation
from fairseq_ccpr.lab import xpr as _xpr  # noqa: F401
from fairseq_ccpr.translator import Translator as Translator

# torch refuses its switch that __init__.py sets together with this, its opposite. That one allows what this
# package rules out, but is not dropped silently: other code in the process may rely on it.
if _os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0").lower() in ("1", "y", "yes", "true"):
    raise _ConfigurationError(
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set in the environment, which lets checkpoints run code: unset it, as "
        "fairseq-ccpr reads nothing but tensors and plain settings from them"
    )
# fairseq keeps its settings in checkpoints as a Namespace, and scores may be NumPy's numbers. Naming these
# classes lets torch load them with weights_only on, so that nothing in a checkpoint can run.
_scalar: _Any = _np.float64(0).__reduce__()[0]
_kinds = (type(_np.dtype(code)) for code in f"?SUMm{_np.typecodes['AllInteger']}{_np.typecodes['AllFloat']}")
_torch.serialization.add_safe_globals([_Namespace, _np.dtype, _scalar, *set(_kinds)])
_torch.serialization.add_safe_globals([(_scalar, "numpy.core.multiarray.scalar")])  # as NumPy 1 saves it
_refuse_retrieval_by_hub()
_show_options_of_tasks()
