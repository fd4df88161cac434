"""The contrastive loss, what it is computed on, and the precision it is to raise, against plain references."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairseq_ccpr.decoding.mixture import retrieval_confidence
from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.lab.accuracy.retrieval_accuracy import any_hit_at_k, precision_at_k
from fairseq_ccpr.models.token_adapter import TokenAdapter
from fairseq_ccpr.search import ExactIndex
from fairseq_ccpr.search.recall import matching_neighbours
from fairseq_ccpr.training.contrast_sampler import VALID_KEYS, ContrastSampler, Text, TokenContrastConfig
from fairseq_ccpr.training.token_clusters import TokenClusters
from fairseq_ccpr.training.token_contrast import supervised_contrastive_loss


def loss_reference(anchors, positives, negatives, temperature):
    """Equation 6 of the CLKNN paper as it stands, in float64, an anchor at a time."""

    def s(a, b):
        return (a @ b) / (np.linalg.norm(a) * np.linalg.norm(b)) / temperature

    losses = []
    for z, plus, minus in zip(*(x.double().numpy() for x in (anchors, positives, negatives))):
        above = np.logaddexp.reduce([s(z, p) for p in plus])
        losses.append(np.logaddexp.reduce([above, *(s(z, n) for n in minus)]) - above)
    return np.array(losses)


@given(
    b=st.integers(1, 5), m=st.integers(1, 4), n=st.integers(1, 33), d=st.integers(2, 20),
    temperature=st.sampled_from([0.01, 0.1, 1.0]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_loss_equals_the_reference(b, m, n, d, temperature, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    anchors, positives, negatives = (
        5 * torch.randn(*s, d, generator=generator) for s in ((b,), (b, m), (b, n))
    )
    found = supervised_contrastive_loss(anchors, positives, negatives, temperature)
    wanted = loss_reference(anchors, positives, negatives, temperature)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-4)
    half = supervised_contrastive_loss(
        anchors.bfloat16(), positives.bfloat16(), negatives.bfloat16(), temperature
    )
    assert half.dtype == torch.float32 and torch.isfinite(half).all()


def test_gradient_of_the_loss() -> None:
    inputs = tuple(
        torch.randn(*s, 4, dtype=torch.float64, requires_grad=True) for s in ((3,), (3, 2), (3, 5))
    )
    assert torch.autograd.gradcheck(lambda a, p, n: supervised_contrastive_loss(a, p, n, 0.5), inputs)


@st.composite
def clustered(draw):
    """Tokens of entries, the groups of their sentences, and the entries' ids; two tokens or more occur in two groups."""
    drawn = draw(st.lists(st.tuples(st.integers(4, 20), st.integers(0, 6)), min_size=1, max_size=60))
    rows = draw(st.permutations([*drawn, (2, 0), (2, 1), (3, 2), (3, 3)]))
    values, groups = torch.tensor(rows).T
    return values, groups, 100 + torch.arange(len(rows))


@given(clustered(), st.integers(1, 5), st.integers(1, 12), st.integers(1, 8), st.integers(0, 2**31))
def test_draws_keep_their_rules(data, m, n, nearest, seed) -> None:
    values, groups, entries = data
    token, group = ({e: int(x) for e, x in zip(entries.tolist(), of)} for of in (values, groups))
    groups_of = {t: {group[e] for e in token if token[e] == t} for t in token.values()}
    clusters = TokenClusters(values, entries, groups)
    assert clusters.anchors == sum(len(groups_of[token[e]]) > 1 for e in token)
    slots = torch.arange(clusters.anchors)
    generator = torch.Generator().manual_seed(seed)
    anchors = clusters.members[slots].tolist()
    assert all(len(groups_of[token[e]]) > 1 for e in anchors)  # a copy of the own sentence is no positive
    cluster = clusters.cluster_of(slots)
    assert [int(clusters.tokens[c]) for c in cluster] == [token[e] for e in anchors]
    own = clusters.own_run(cluster, torch.tensor([group[e] for e in anchors]))
    assert torch.equal(clusters.own_run(cluster, torch.full_like(cluster, 99)), torch.full_like(cluster, -1))
    assert torch.equal(clusters.own_run(cluster, torch.full_like(cluster, -1)), torch.full_like(cluster, -1))
    positives = clusters.members[clusters.draw_positives(cluster, own, m, generator)].tolist()
    for anchor, row in zip(anchors, positives):
        others = groups_of[token[anchor]] - {group[anchor]}
        assert all(token[i] == token[anchor] and group[i] in others for i in row)
        if len(others) >= m:
            assert len({group[i] for i in row}) == m

    def barred(drawn):  # of the anchor's group, or of the next one
        mine = torch.tensor([group[e] for e in anchors])
        theirs = torch.tensor([group[e] for e in clusters.members[drawn].flatten().tolist()]).view(
            drawn.shape
        )
        return (theirs - mine.unsqueeze(1)).eq(0) | (theirs - mine.unsqueeze(1)).eq(1)

    similarities = torch.randn(len(slots), len(clusters.tokens), generator=generator)
    hard = clusters.draw_negatives(cluster, similarities, n, nearest, barred, generator)
    near = min(nearest, len(clusters.tokens) - 1)
    for number, anchor in enumerate(anchors):
        order = [
            c for c in similarities[number].argsort(descending=True).tolist() if c != int(cluster[number])
        ]
        candidates = {int(clusters.tokens[c]) for c in order[:near]}
        drawn = clusters.members[hard[number]].tolist()
        assert {token[i] for i in drawn} <= candidates
        allowed = {t for t in candidates if not groups_of[t] & {group[anchor], group[anchor] + 1}}
        if allowed:  # whatever member is drawn of these
            assert not {group[i] for i in drawn} & {group[anchor], group[anchor] + 1}
        if len(allowed) >= n:
            assert len({token[i] for i in drawn}) == n


def test_every_group_is_as_likely_to_be_drawn() -> None:
    # Group 1 has two of the entries; the anchor is the one of group 2.
    clusters = TokenClusters(
        torch.tensor([7] * 7 + [8] * 3), torch.arange(10), torch.tensor([0, 1, 1, 2, 3, 4, 5, 1, 2, 3])
    )
    generator = torch.Generator().manual_seed(1)
    cluster = torch.zeros(20000, dtype=torch.long)
    for m in (1, 3, 5):
        drawn = clusters.draw_positives(cluster, torch.full((20000,), 2), m, generator)
        counts = torch.bincount(clusters.members[drawn].flatten(), minlength=7)
        assert counts[3] == 0
        np.testing.assert_allclose(counts[[0, 4, 5, 6]] / 20000, m / 5, atol=0.02)
        np.testing.assert_allclose(counts[[1, 2]] / 20000, m / 10, atol=0.02)
    drawn = clusters.draw_positives(cluster, torch.full((20000,), -1), 1, generator)  # a query of no group
    np.testing.assert_allclose(
        torch.bincount(clusters.members[drawn].flatten())[[0, 3, 4]] / 20000, 1 / 6, atol=0.02
    )


def test_centres_of_large_clusters_are_means_of_a_sample() -> None:
    torch.manual_seed(7)
    keys, values = torch.randn(4000, 5) + torch.tensor([1.0, 0, 0, 0, 0]), torch.arange(4000) % 4
    keys[:, 1] += 2 * values
    found = TokenClusters(values, torch.arange(4000), torch.arange(4000)).centres(
        lambda entries: keys[entries], torch.Generator()
    )
    wanted = torch.nn.functional.normalize(
        torch.stack([keys[values == v].mean(dim=0) for v in range(4)]), dim=1
    )
    assert (found * wanted).sum(dim=1).min() > 0.9


def test_centres_are_means() -> None:
    torch.manual_seed(2)
    keys, values = torch.randn(300, 5), torch.randint(0, 40, (300,))
    clusters = TokenClusters(values, torch.arange(300), torch.arange(300))
    found = clusters.centres(lambda entries: keys[entries], torch.Generator())
    for token, centre in zip(clusters.tokens, found):
        mean = keys[values == token].mean(dim=0)
        torch.testing.assert_close(centre, mean / mean.norm())


@given(st.integers(1, 40), st.integers(1, 12), st.booleans(), st.integers(0, 2**31))
def test_precision_leaves_out_the_own_sentence(size, k, exclude, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(size, 4, generator=generator)
    values, sentences = (torch.randint(0, 5, (size,), generator=generator) for _ in range(2))
    rows = torch.randint(size, (7,), generator=generator)
    queries, targets, own = keys[rows], values[rows], sentences[rows]
    given_sentences = (sentences, own, int(torch.bincount(sentences).max())) if exclude else ()
    found = matching_neighbours(ExactIndex(keys, "l2"), values, queries, targets, k, *given_sentences)
    for number in range(7):
        order = (keys - queries[number]).square().sum(1).argsort(stable=True).tolist()
        order = [i for i in order if not exclude or sentences[i] != own[number]][:k]
        wanted = [bool(values[i] == targets[number]) for i in order] + [False] * (k - len(order))
        assert sum(found[number].tolist()) == sum(wanted)
    np.testing.assert_allclose(precision_at_k(found)[:, -1], found.float().mean(1), atol=1e-6)
    assert torch.equal(any_hit_at_k(found)[:, -1] > 0, found.any(1))


def test_confidence_is_the_mean_similarity_of_what_was_found() -> None:
    no = float("-inf")
    scores = torch.tensor([[0.9, 0.6, 0.3], [0.8, no, no], [no, no, no], [0.7, 0.7, 0.7], [0.5, -0.5, -0.9]])
    torch.testing.assert_close(retrieval_confidence(scores), torch.tensor([0.6, 0.8, 0.0, 0.7, 0.5 / 3]))
    wanted = torch.tensor([(0.8 + 0.2 + 0) / 3, 0.6, 0.0, 0.4, 0.0])
    torch.testing.assert_close(retrieval_confidence(scores, least=0.5), wanted)


SETTINGS = TokenContrastConfig(
    positives=2, negatives=8, nearest_clusters=16, refresh_interval=20, valid_queries=200, seed=1
)


def noisy_keys(seed: int) -> Text:
    """Keys whose token hides in 4 of 32 dimensions, the others being louder and of no use."""
    rng = np.random.default_rng(seed)
    values = rng.integers(4, 44, 4000).astype(np.int32)
    directions = rng.normal(size=(44, 4))
    keys = np.concatenate(
        [directions[values] + 0.1 * rng.normal(size=(4000, 4)), 3 * rng.normal(size=(4000, 28))], axis=1
    )
    provenance = np.stack([np.arange(4000) // 10, np.arange(4000) % 10], axis=1)
    return Text(keys.astype(np.float16), values, provenance, rng.integers(1, 1 << 63, 400, np.uint64))


def test_training_raises_precision_where_it_can() -> None:
    torch.manual_seed(3)
    sampler = ContrastSampler(noisy_keys(3), SETTINGS, torch.device("cpu"))
    adapter = TokenAdapter(32, 64, 16)
    optimizer = torch.optim.Adam(adapter.parameters(), 3e-3)

    def precision() -> float:
        sampler.prepare_validation(adapter)
        return sampler.precision(adapter, torch.arange(len(sampler.query_values)), 8).mean().item()

    before = precision()
    for update in range(400):
        z = adapter(sampler.draw(adapter, 64, update, 0))
        loss = supervised_contrastive_loss(z[:, 0], z[:, 1:3], z[:, 3:], 0.1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert before < 0.1 and precision() > 0.7


def test_draws_depend_on_nothing_but_their_arguments() -> None:
    adapter = TokenAdapter(32, 64, 16)
    one, two = (ContrastSampler(noisy_keys(4), SETTINGS, torch.device("cpu")) for _ in range(2))
    two.draw(adapter, 5, 41, 0)
    assert torch.equal(one.draw(adapter, 5, 45, 3), two.draw(adapter, 5, 45, 3))
    assert not torch.equal(one.draw(adapter, 5, 45, 3), one.draw(adapter, 5, 45, 4))


def test_held_out_sentences_are_never_drawn() -> None:
    text = noisy_keys(5)
    text.keys[:, 0] = text.sentences % 1000 / 10
    sampler = ContrastSampler(text, SETTINGS, torch.device("cpu"))
    held_out = set((sampler.query_keys[:, 0].float() * 10).round().int().tolist())
    assert 20 <= len(held_out) <= 40
    drawn = sampler.draw(TokenAdapter(32, 64, 16), 500, 0, 0)[..., 0].float()
    assert not held_out & set((drawn * 10).round().int().flatten().tolist())
    assert not held_out & set((sampler.rows(sampler.valid_pool)[:, 0] * 10).round().int().tolist())


@pytest.mark.parametrize("seed", range(4))
def test_numbers_without_entries_are_never_held_out(seed: int) -> None:
    """As of sentences that were left out; with few groups, a single one is held out."""
    keys, values = torch.randn(12, 8).half().numpy(), np.array([4, 5, 6, 7] * 3, np.int32)
    provenance = np.array([[3 * (row // 4) + 2, row % 4] for row in range(12)])
    values[[0, 4, 8]] += np.array([10, 11, 12], np.int32)  # no two are the same
    text = Text(keys, values, provenance, np.arange(9, dtype=np.uint64))
    sampler = ContrastSampler(text, replace(SETTINGS, seed=seed), torch.device("cpu"))
    assert (len(sampler.query_values), len(sampler.valid_pool)) == (4, 8)


def test_queries_of_other_text_leave_all_the_rest_for_training() -> None:
    text, other = noisy_keys(6), noisy_keys(7)
    other.values[:50] = text.values.max() + 3  # tokens that training has not
    sampler = ContrastSampler(text, SETTINGS, torch.device("cpu"), other)
    size = len(text.keys)
    assert len(sampler.valid_pool) == min(VALID_KEYS, size) and sampler.clusters.anchors == size
    assert len(sampler.query_keys) == SETTINGS.valid_queries
    assert {key.tobytes() for key in sampler.query_keys.numpy()} <= {key.tobytes() for key in other.keys}
    adapter = TokenAdapter(32, 64, 16)
    sampler.prepare_validation(adapter)
    everything = torch.arange(SETTINGS.valid_queries)
    unknown = sampler.query_values == text.values.max() + 3
    assert unknown.any() and not sampler.precision(adapter, everything, 4)[unknown].any()
    assert len(sampler.draw_held_out(adapter, everything)) == int((~unknown).sum())


def test_a_store_without_repeated_tokens_is_refused() -> None:
    values = np.array([4, 4, 5, 6, 7], dtype=np.int32)
    with pytest.raises(
        DatastoreError,
        match=r"too small to train an adapter on: of the [1-5] entries that are not held out, [01] tokens",
    ):
        provenance = np.stack([np.arange(5), np.zeros(5, int)], axis=1)
        text = Text(np.zeros((5, 8), np.float16), values, provenance, np.arange(1, 6).astype(np.uint64))
        ContrastSampler(text, SETTINGS, torch.device("cpu"))
