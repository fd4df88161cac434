"""What a retriever and a memory must offer: the two interfaces that decoding is written against.

A retriever searches a token datastore. A memory turns what was retrieved for a batch into votes, step by step.
Letters: B sentences, H hypotheses, N tokens, S source subwords, d decoder width, k neighbours, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.distribution import Distribution
from fairseq_ccpr.decoding.interpolation import Vote
from fairseq_ccpr.decoding.learned_memory import LearnedEntries


class Neighbours(NamedTuple):
    """The nearest entries of N queries, best first; missing ones may stand between them.

    Args:
        ids: int64 [N, k], entries; -1 where one is missing.
        scores: fp32 [N, k], inner products or minus squared distances; -inf where one is missing.
        values: int64 [N, k], their tokens; any token where one is missing.
    """

    ids: Tensor
    scores: Tensor
    values: Tensor


class Retriever(Protocol):
    """Searches a token datastore. `TranslationRetrievalTask.retriever_class` names the class.

    It is called with an opened datastore and the model's device, and must keep no state from one search to the next:
    several generators, or threads, may share it.
    """

    datastore: TokenDatastore

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Find the k nearest entries of the decoder's states, [N, d] in any float dtype, on its device."""
        ...

    def describe(self) -> dict[str, object]:
        """Name all that decides what is retrieved, by name: the retrieval signature prints it."""
        ...


@runtime_checkable
class LearningRetriever(Retriever, Protocol):
    """A retriever that also searches what was learnt alongside its datastore."""

    def project(self, states: Tensor) -> Tensor:
        """Make keys of the decoder's states, [N, d] in any float dtype."""
        ...

    def with_learnt(self, entries: LearnedEntries) -> LearningRetriever:
        """Return the same retriever with what was learnt up to a moment, whose entries are numbered after its own."""
        ...


class ModelView(Protocol):
    """What the model says at N tokens, as far as an interpolation weight may need it; looked up on demand."""

    @property
    def neighbours(self) -> Tensor:
        """log p_NMT of the neighbours' tokens, fp32 [N, k]."""
        ...

    @property
    def best(self) -> Tensor:
        """log p_NMT of the likeliest token, fp32 [N]."""
        ...

    @property
    def favourite(self) -> Tensor:
        """The likeliest token, int64 [N]."""
        ...


class Batch(Protocol):
    """What a memory knows of one batch while its hypotheses grow. Nothing of it outlives the batch."""

    def listening(self) -> AbstractContextManager[None]:
        """Open a context in which the models compute a step: what their layers say may be read meanwhile."""
        ...

    def vote(self, tokens: Tensor, model: Distribution) -> Vote:
        """Vote for the next token, once per step.

        Args:
            tokens: int64 [H, t], the hypotheses so far, with the end of the sentence in front.
            model: what it says at them.
        """
        ...

    def reorder(self, order: Tensor) -> Batch:
        """Follow the beam: hypothesis i continues what hypothesis order[i] was, int64 [H']."""
        ...


class Memory(Protocol):
    """A datastore alongside the decoder, with the settings that decide how it counts. Immutable."""

    def start(self, sources: Tensor) -> Callable[[], Batch]:
        """Start retrieval for the sentences of a batch, int64 [B, S]; returns a function that waits for the result.

        The batch begins with one hypothesis a sentence; `Batch.reorder` makes more of them.
        """
        ...

    def signature(self) -> str:
        """Return everything that decides what is retrieved and how it counts, as one line to print with results."""
        ...
