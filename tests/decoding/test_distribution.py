"""What the model says at a step: the likeliest tokens against `max`, found once."""

from __future__ import annotations

import pytest
import torch

from fairseq_ccpr.decoding.mixture import RUN, Distribution, likeliest


@pytest.mark.parametrize("words", [1, RUN - 1, 2 * RUN - 1, 2 * RUN, 2 * RUN + 1, 3 * RUN - 1, 1000, 4099])
@pytest.mark.parametrize("values", [2, 10**6])
def test_likeliest_tokens_are_those_of_max(words, values) -> None:
    """Two values make nearly all tokens equal to others; some rows have nothing that is possible."""
    log_probs = -torch.randint(values, (40, words), generator=torch.Generator().manual_seed(words)).float()
    log_probs[::7] = float("-inf")
    log_probs[3, -1] = log_probs[4, 0] = 1.0
    best, favourite = likeliest(log_probs)
    wanted = log_probs.max(dim=1)
    assert torch.equal(best, wanted.values) and torch.equal(favourite, wanted.indices)


def test_no_hypotheses_have_no_likeliest_tokens() -> None:
    assert [tuple(part.shape) for part in likeliest(torch.empty(0, 1000))] == [(0,), (0,)]


def test_all_who_look_at_a_step_share_its_likeliest_tokens(monkeypatch) -> None:
    """Guard, votes of phrases and trust look through the vocabulary once."""
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(
        "fairseq_ccpr.decoding.mixture.likeliest",
        lambda log_probs: asked.append(log_probs) or log_probs.max(dim=1),
    )
    log_probs = torch.randn(4, 300, generator=torch.Generator().manual_seed(7)).log_softmax(dim=1)
    model, values = Distribution(log_probs), torch.tensor([[3, 3, 299]] * 4)
    views = [model.view(values), model.view(values[:, :1])]
    assert all(torch.equal(view.best, log_probs.amax(dim=1)) for view in views)
    assert torch.equal(views[0].favourite, model.likeliest.favourite)
    assert torch.equal(views[0].neighbours, log_probs[:, [3, 3, 299]])
    assert len(asked) == 1
