"""What the model says at a step: the likeliest tokens against `max`, found once."""

from __future__ import annotations

import pytest
import torch

from fairseq_ccpr.decoding.mixture import RUN, Distribution, Mixture, Vote, merge_equal, run_peaks


@pytest.mark.parametrize("words", [1, RUN - 1, 2 * RUN - 1, 2 * RUN, 2 * RUN + 1, 3 * RUN - 1, 1000, 4099])
@pytest.mark.parametrize("values", [2, 10**6])
def test_likeliest_tokens_are_those_of_max(words, values) -> None:
    """Two values make nearly all tokens equal to others; some rows have nothing that is possible."""
    log_probs = -torch.randint(values, (40, words), generator=torch.Generator().manual_seed(words)).float()
    log_probs[::7] = float("-inf")
    log_probs[3, -1] = log_probs[4, 0] = 1.0
    best, favourite = Distribution(log_probs).likeliest
    wanted = log_probs.max(dim=1)
    assert torch.equal(best, wanted.values) and torch.equal(favourite, wanted.indices)


def test_no_hypotheses_have_no_likeliest_tokens() -> None:
    assert [tuple(part.shape) for part in Distribution(torch.empty(0, 1000)).likeliest] == [(0,), (0,)]


def test_all_who_look_at_a_step_share_its_likeliest_tokens(monkeypatch) -> None:
    """Guard, votes of phrases and trust look through the vocabulary once."""
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(
        "fairseq_ccpr.decoding.mixture.run_peaks",
        lambda log_probs: asked.append(log_probs) or run_peaks(log_probs),
    )
    log_probs = torch.randn(4, 300, generator=torch.Generator().manual_seed(7)).log_softmax(dim=1)
    model, values = Distribution(log_probs), torch.tensor([[3, 3, 299]] * 4)
    views = [model.view(values), model.view(values[:, :1])]
    assert all(torch.equal(view.best, log_probs.amax(dim=1)) for view in views)
    assert torch.equal(views[0].favourite, model.likeliest.favourite)
    assert torch.equal(views[0].neighbours, log_probs[:, [3, 3, 299]])
    assert len(asked) == 1


@pytest.mark.parametrize("known", [False, True], ids=["peaks are found by mixing", "peaks are known before"])
@pytest.mark.parametrize("words", [RUN - 1, 2 * RUN, 5 * RUN + 1])
def test_peaks_stay_the_highest_of_their_runs(words: int, known: bool) -> None:
    """After votes that name tokens several times, have no weight, or all of it, and after tokens are ruled out."""
    model = Distribution(torch.randn(6, words).log_softmax(dim=1))
    if known:
        assert torch.equal(model.peaks, run_peaks(model.log_probs))
    votes = []
    for weight in ([0.0, 0.2, 0.5, 1.0, 0.3, 0.0], [0.0, 0.3, 0.5, 0.0, 0.0, 0.9]):
        values = torch.randint(words, (6, 9))
        values[:, 1] = values[:, 0]
        said = merge_equal(torch.rand(6, 9).softmax(dim=1), values).log()
        votes.append(Vote(values, said, torch.tensor(weight)))
    for some in (votes[:1], votes, []):
        model = Mixture().mix(model, some)
        assert torch.equal(model.peaks, run_peaks(model.log_probs))
    model.log_probs[:, [0, words - 1]] = float("-inf")
    assert torch.equal(model.again({0, words - 1}).peaks, run_peaks(model.log_probs))
