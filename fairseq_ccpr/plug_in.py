"""What this package gives: public names for programs, and for fairseq tasks, models and criterions, which it registers."""

# Every name here without an underscore is one of `fairseq_ccpr`; strict type checkers want it written twice.

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
from fairseq_ccpr.decoding.retrieval_task import RetrievalTask as RetrievalTask
from fairseq_ccpr.decoding.task import TranslationRetrievalTask as TranslationRetrievalTask
from fairseq_ccpr.decoding.token_memory import TokenMemory as TokenMemory
from fairseq_ccpr.decoding.token_retriever import LearningRetriever as LearningRetriever
from fairseq_ccpr.decoding.token_retriever import Neighbours as Neighbours
from fairseq_ccpr.decoding.token_retriever import Retriever as Retriever
from fairseq_ccpr.decoding.token_retriever import TokenRetriever as TokenRetriever
from fairseq_ccpr.decoding.trust import Decision as Decision
from fairseq_ccpr.decoding.trust import Trust as Trust
from fairseq_ccpr.decoding.trust import TrustStep as TrustStep
from fairseq_ccpr.errors import CcprError as CcprError
from fairseq_ccpr.errors import CheckpointError as CheckpointError
from fairseq_ccpr.errors import ConfigurationError as ConfigurationError
from fairseq_ccpr.errors import DatastoreError as DatastoreError
from fairseq_ccpr.importing import change_fairseq as _change_fairseq
from fairseq_ccpr.inference.system import Translation as Translation
from fairseq_ccpr.text.languages import LanguageTags as LanguageTags
from fairseq_ccpr.translator import Translator as Translator

_change_fairseq()
