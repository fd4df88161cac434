"""Learn how much each retrieved phrase counts, by the likelihood of held-out references."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.decoding.phrase_votes import PhraseVotes, Proposals
from fairseq_ccpr.device import one_thread
from fairseq_ccpr.evaluation.tuning.held_out import CachedView, PhraseCache, PhraseRows
from fairseq_ccpr.evaluation.tuning.phrase_grid import References
from fairseq_ccpr.progress import progress_bar

UPDATES, TOKENS = 240, 512  # of one batch of each text in an update
LEARNING_RATE, DECAY, EVERY = 0.05, 0.6, 60  # the rate falls by this factor after so many updates
HELD_OUT = 5  # one sentence in so many is not trained on, but judges
# Weight of what a token loses against the system without phrases. References are kinder than the hypotheses of beam search,
# after which a phrase's continuation is right less often.
HARM = 1.0


@dataclass(frozen=True)
class VotingText:
    """A text to learn from: its phrases, and the probabilities of its references without them."""

    cache: PhraseCache
    sentences: Tensor  # int64 [N], the number of each token's sentence
    references: References

    def log_likelihoods(self, memory: PhraseMemory, batch: PhraseRows) -> tuple[Tensor, Tensor]:
        """Compute log p of n reference tokens with the phrase memory and without it, fp32 [n] each."""
        references = self.references.at(batch.rows)
        vote = batch.vote(memory)
        said, silent = vote.of_token(batch.targets), torch.zeros_like(vote.weight)
        without = references.log_likelihood(torch.full_like(said, float("-inf")), silent)
        return references.log_likelihood(said, vote.weight), without

    def split(self) -> tuple[list[PhraseRows], list[PhraseRows]]:
        """Part the tokens by sentence, as `TrainingText.split` does: to train on, and held out."""
        held_out = [self.sentences[batch.rows] % HELD_OUT == 0 for batch in self.cache.batches]
        parts = ([_part(one, ~rows), _part(one, rows)] for one, rows in zip(self.cache.batches, held_out))
        trained, judged = zip(*parts)
        return [one for one in trained if len(one.targets)], [one for one in judged if len(one.targets)]


@one_thread()
def learn_votes(memory: PhraseMemory, texts: list[VotingText], seed: int = 1) -> PhraseVotes:
    """Learn by Adam from where a memory's votes are; returns the best on sentences held out, which may be the start.

    The loss of a text is its mean -log p, and what its tokens lose against the system without phrases. All texts count
    alike.
    """
    votes = copy.deepcopy(memory.votes).requires_grad_(True)
    memory = replace(memory, votes=votes, trusted=False)
    generator = torch.Generator().manual_seed(seed)
    trained, held_out = zip(*(text.split() for text in texts))
    if not all((*trained, *held_out)):  # of so few sentences nothing can be learned
        return votes.requires_grad_(False)
    optimizer = torch.optim.Adam(votes.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, EVERY, DECAY)
    best, best_loss = copy.deepcopy(votes.state_dict()), float("inf")
    with torch.enable_grad():
        for update in progress_bar("votes", "update", range(UPDATES + 1)):
            if update % EVERY == 0:
                with torch.no_grad():
                    loss = float(torch.stack([_loss(memory, text, own) for text, own in zip(texts, held_out)]).mean())
                if loss < best_loss:
                    best, best_loss = copy.deepcopy(votes.state_dict()), loss
            optimizer.zero_grad()
            some = [[_sample(own, generator)] for own in trained]
            torch.stack([_loss(memory, text, own) for text, own in zip(texts, some)]).mean().backward()
            optimizer.step()
            schedule.step()
    votes.load_state_dict(best)
    return votes.requires_grad_(False)


def _loss(memory: PhraseMemory, text: VotingText, batches: list[PhraseRows]) -> Tensor:
    each = [text.log_likelihoods(memory, batch) for batch in batches]
    found, without = (torch.cat(parts) for parts in zip(*each))
    return HARM * (without - found).clamp_min(0).mean() - found.mean()


def _sample(batches: list[PhraseRows], generator: torch.Generator) -> PhraseRows:
    """Draw a batch, and some of its tokens."""
    batch = batches[int(torch.randint(len(batches), (), generator=generator))]
    return _part(batch, torch.randint(len(batch.targets), (TOKENS,), generator=generator))


def _part(batch: PhraseRows, rows: Tensor) -> PhraseRows:
    """Select some tokens of a batch, by number or by bool."""
    return batch._replace(
        proposals=Proposals(*(part[rows] for part in batch.proposals)), sentences=batch.sentences[rows],
        targets=batch.targets[rows], rows=batch.rows[rows], model=CachedView(*(part[rows] for part in batch.model)),
    )  # fmt: skip
