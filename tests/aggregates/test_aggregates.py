"""What hostile messages can and cannot do to each aggregate."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paths import ROOT

import jaxcomp
from jaxcomp import aggregates
from jaxcomp.aggregates import (
    ClippedMean,
    CoordinateMedian,
    Credible,
    CredibleState,
    Mean,
    TrimmedMean,
)

WORKERS = 31
RNG = np.random.default_rng(0)
HONEST = (1 + RNG.standard_normal((WORKERS, 40))).astype(np.float32)
LARGE = 1e30
RULES = (Mean(), ClippedMean(2.0), CoordinateMedian(), TrimmedMean(0.2), Credible())


@functools.partial(jax.jit, static_argnums=0)
def combined(rule, messages, weights=None):
    workers = jax.tree.leaves(messages)[0].shape[0]
    weights = jnp.ones(workers) if weights is None else weights
    like = jax.tree.map(lambda x: x[0], messages)
    return aggregates.combine(rule, messages, weights, rule.init(like, workers))


def attacked(attackers, value=LARGE):
    """The messages, of which the first ones are hostile, and the range of the honest ones."""
    messages = HONEST.copy()
    messages[:attackers] = value
    honest = HONEST[attackers:]
    return messages, honest.min(0), honest.max(0)


def inside(value, low, high):
    value = np.asarray(value)
    return bool(((value >= low) & (value <= high)).all())


@pytest.mark.parametrize("value", [LARGE, -LARGE, 3e38])
def test_the_median_holds_until_half_of_the_workers_are_hostile(value):
    for attackers, holds in ((0, True), (1, True), (15, True), (16, False)):
        messages, low, high = attacked(attackers, value)
        found = combined(CoordinateMedian(), messages).value
        assert inside(found, low, high) == holds, attackers
    want = np.median(attacked(15)[0], axis=0)
    np.testing.assert_array_equal(combined(CoordinateMedian(), attacked(15)[0]).value, want)


def test_the_trimmed_mean_holds_as_long_as_it_cuts_all_attackers():
    """Of 31 workers a fraction of 0.2 is 6, and 0.45 is 13."""
    for trim, cut in ((0.0, 0), (0.2, 6), (0.45, 13)):
        for attackers, holds in ((cut, True), (cut + 1, False)):
            messages, low, high = attacked(attackers)
            found = combined(TrimmedMean(trim), messages).value
            assert inside(found, low, high) == holds, (trim, attackers)
    ordered = np.sort(HONEST.astype(np.float64), axis=0)
    np.testing.assert_allclose(
        combined(TrimmedMean(0.2), HONEST).value, ordered[6:25].mean(0), rtol=2e-6
    )
    np.testing.assert_allclose(combined(TrimmedMean(0.0), HONEST).value, HONEST.mean(0), rtol=1e-5)


@pytest.mark.core("30")
@pytest.mark.parametrize("worker", [0, 30])
def test_a_worker_moves_the_clipped_mean_by_its_share_of_the_norm(worker):
    """The bound is `2 · norm · w / Σ w`, and is reached by a message that turns around."""
    norm, rule = 2.0, ClippedMean(2.0)
    weights = jnp.asarray(RNG.uniform(0.5, 1.5, WORKERS), jnp.float32)
    bound = 2 * norm * float(weights[worker] / weights.sum())
    tree = {"a": HONEST[:, :30], "b": HONEST[:, 30:].reshape(WORKERS, 2, 5)}
    moved = []

    def spoilt(value):
        found = {name: x.copy() for name, x in tree.items()}
        for x in found.values():
            x[worker] = value
        return found

    before = combined(rule, spoilt(np.float32(1e6)), weights).value
    for value in (-1e6, LARGE, -LARGE, 3e38, 1e-30, 0.0, np.nan, np.inf):
        after = combined(rule, spoilt(np.float32(value)), weights).value
        gap = [np.asarray(before[name], np.float64) - np.asarray(after[name]) for name in tree]
        moved.append(np.sqrt(sum((g**2).sum() for g in gap)))
    assert max(moved) <= bound * (1 + 1e-5)
    assert moved[0] > bound * (1 - 1e-4)
    # A tenfold norm allows ten times as much, and a message within the norm is not changed.
    wide = combined(ClippedMean(1e4), HONEST).value
    np.testing.assert_allclose(wide, HONEST.mean(0), rtol=1e-5)
    one = HONEST[worker]
    np.testing.assert_array_equal(ClippedMean(1e4).prepare(one), one)


def test_one_worker_moves_the_mean_anywhere():
    messages, low, high = attacked(1)
    assert not inside(combined(Mean(), messages).value, low, high)


@pytest.mark.core("Mean()")
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_messages_that_are_not_finite_are_excluded_and_counted(rule):
    """So are those of absent workers, which are not counted."""
    want = combined(rule, HONEST[4:])
    messages = HONEST.copy()
    messages[0, 3], messages[1, 5], messages[2, 7], messages[3] = np.nan, np.inf, -np.inf, LARGE
    weights = jnp.ones(WORKERS).at[3].set(0)
    found = combined(rule, messages, weights)
    assert int(found.excluded) == 3
    np.testing.assert_allclose(found.value, want.value, rtol=2e-6)
    messages[3] = np.nan
    again = combined(rule, messages, weights)
    assert int(again.excluded) == 3
    np.testing.assert_array_equal(again.value, found.value)
    for spoilt, excluded in ((jnp.nan, 0), (-1.0, 0), (jnp.inf, 0)):
        other = combined(rule, messages, weights.at[3].set(spoilt))
        assert int(other.excluded) == 3 + excluded
        np.testing.assert_array_equal(other.value, found.value)


@pytest.mark.core("Mean()")
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_half_of_the_messages_must_be_finite(rule):
    messages = HONEST[:8].copy()
    messages[:3] = np.nan
    assert np.isfinite(combined(rule, messages).value).all()
    messages[3] = np.nan
    found = combined(rule, messages)
    assert int(found.excluded) == 4
    assert np.isnan(found.value).all()
    first = rule.init(messages[0], 8)
    for new, old in zip(*map(jax.tree.leaves, (found.state, first)), strict=True):
        np.testing.assert_array_equal(new, old)
    nobody = combined(rule, messages, jnp.zeros(8))
    assert int(nobody.excluded) == 0
    np.testing.assert_array_equal(nobody.value, 0)


@pytest.mark.core("Mean()")
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_equal_messages_are_their_own_combination(rule):
    """In each dtype, with one worker and with many."""
    for dtype in ("float16", "bfloat16", "float32"):
        message = jnp.asarray(HONEST[0] / 8, dtype)  # Within the norm.
        for workers in (1, 4):
            rows = jnp.stack([message] * workers)
            found = combined(rule, {"w": rows}).value["w"]
            assert found.dtype == message.dtype
            np.testing.assert_array_equal(found, message)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_no_dtype_or_rank_is_promoted_implicitly(rule):
    for dtype in ("bfloat16", "float32"):
        like = {"a": jax.ShapeDtypeStruct((3, 4), dtype), "b": jax.ShapeDtypeStruct((2,), dtype)}
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((5, *x.shape), x.dtype), like)
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            found = jax.eval_shape(combined, rule, rows)
        assert jax.tree.map(lambda x: x.dtype, found.value) == jax.tree.map(lambda x: x.dtype, like)


def test_a_server_adds_up_what_streams():
    """Message after message: the same as all at once, up to the order of factors."""
    like = jnp.zeros(40)
    messages = HONEST.copy()
    messages[5, 5] = np.inf
    weights = RNG.uniform(0.5, 1.5, WORKERS).astype(np.float32)
    weights[7] = 0
    for rule in (Mean(), ClippedMean(2.0)):
        assert rule.streams

        @jax.jit
        def folded(messages, weights, rule=rule):
            def step(total, pair):
                return aggregates.add(rule, total, *pair), None

            total, _ = jax.lax.scan(step, aggregates.zero_total(like), (messages, weights))
            return aggregates.mean_of(total, like)

        one, all_ = folded(messages, weights), combined(rule, messages, weights)
        assert int(one.excluded) == int(all_.excluded) == 1
        np.testing.assert_allclose(one.value, all_.value, rtol=1e-5, atol=1e-6)
    for rule in (CoordinateMedian(), TrimmedMean(), Credible()):
        assert not rule.streams
        with pytest.raises(ValueError, match="which needs all messages at once"):
            aggregates.add(rule, aggregates.zero_total(like), like, 1.0)


class TestFedVote:
    """One round of binary votes on `tanh(1.5 θ)`, `θ ~ N(0, 0.5²)`, by 31 workers.

    Hostile workers know the votes of all others and send the opposite of their majority.
    """

    SIZE = 20_000
    WEIGHTS = np.tanh(1.5 * np.random.default_rng(1).normal(0, 0.5, SIZE))

    def votes(self, attackers, seed=2):
        drawn = np.random.default_rng(seed).random((WORKERS, self.SIZE))
        votes = np.where(drawn < (self.WEIGHTS + 1) / 2, 1.0, -1.0).astype(np.float32)
        votes[:attackers] = -np.where(votes[attackers:].sum(0) > 0, 1, -1)
        return votes

    def error(self, rule, attackers):
        value = combined(rule, self.votes(attackers)).value
        return float(np.mean((np.asarray(value) - self.WEIGHTS) ** 2))

    @pytest.mark.parametrize(
        ("attackers", "plain", "credible"),
        [(0, 0.0226, 0.048), (5, 0.0655, 0.0275), (10, 0.222, 0.033), (14, 0.43, 2.18)],
    )
    def test_one_round(self, attackers, plain, credible):
        """The threshold leaves out half of the honest workers; 14 of 31 turn the majority.

        Without attackers, the workers that are left out, and so the error, depend on the draw.
        """
        assert self.error(Mean(), attackers) == pytest.approx(plain, rel=0.02)
        loose = 0.15 if attackers == 0 else 0.03
        assert self.error(Credible(rule="hard"), attackers) == pytest.approx(credible, rel=loose)

    def test_a_third_has_no_weight_and_more_may_have_all(self):
        errors = {b: self.error(Credible(rule="hard"), b) for b in (10, 11, 12)}
        assert errors[10] < 0.05 < 1 < errors[12]
        votes = self.votes(10)
        found = combined(Credible(rule="hard"), votes)
        np.testing.assert_allclose(found.value, votes[10:].mean(0), atol=0.01)
        assert found.state.credibility[:10].max() < found.state.credibility[10:].min()

    def test_trusted_workers_keep_the_majority(self):
        """The optimistic variant: the majority of those who are known to be honest."""
        assert self.error(Credible(rule="hard", trusted=tuple(range(14, WORKERS))), 14) < 0.05

    def test_without_the_threshold_attackers_keep_some_weight(self):
        assert 0.15 < self.error(Credible(rule="soft"), 10) < self.error(Mean(), 10)

    def test_credibility_is_smoothed_and_absent_workers_keep_theirs(self):
        rule, votes = Credible(decay=0.5, rule="hard"), jnp.asarray(self.votes(10))
        first = rule.init(votes[0], WORKERS)
        _, one = jax.jit(rule.combine)(votes, jnp.ones(WORKERS), first)
        weights = jnp.ones(WORKERS).at[jnp.array([0, 30])].set(0)
        _, two = jax.jit(rule.combine)(votes, weights, one)
        majority = np.sign(np.asarray(votes).sum(0))
        agreed = (np.asarray(votes) == majority).mean(1)
        np.testing.assert_allclose(one.credibility, 0.5 + 0.5 * agreed, atol=1e-6)
        assert two.credibility[0] == one.credibility[0]
        assert two.credibility[30] == one.credibility[30]
        majority = np.sign(np.asarray(votes)[1:30].sum(0))
        agreed = (np.asarray(votes) == majority).mean(1)[1:30]
        want = 0.5 * np.asarray(one.credibility)[1:30] + 0.5 * agreed
        np.testing.assert_allclose(two.credibility[1:30], want, atol=1e-6)


def test_the_plurality_of_ternary_votes():
    """Zero wins with most votes; a tie agrees with nobody; elements without a vote do not count."""
    votes = jnp.array(
        [
            [1.0, 0.0, 1.0, -1.0, 0.0],
            [1.0, 0.0, -1.0, -1.0, 0.0],
            [1.0, 1.0, 1.0, 0.0, 0.0],
            [-1.0, 0.0, -1.0, 1.0, 0.0],
        ]
    )
    found = combined(Credible(decay=0.0, rule="hard"), votes)
    np.testing.assert_allclose(found.state.credibility, [0.75, 0.75, 0.25, 0.25])
    np.testing.assert_array_equal(found.value, votes[:2].mean(0))
    zeros = combined(Credible(decay=0.0, rule="hard"), jnp.zeros((4, 5)))
    np.testing.assert_array_equal(zeros.state.credibility, 1)


@pytest.mark.parametrize("rule", ["bounded", "soft"])
def test_weights_multiply_credibility(rule):
    """The first three workers make the majority, which the last contradicts in one of four."""
    votes = np.ones((4, 4), np.float32)
    votes[0, 0] = votes[1, 1] = votes[3, 2] = -1
    weights = np.array([1, 2, 4, 8], np.float32)
    found = combined(Credible(rule=rule), votes, weights)
    trust = np.asarray(found.state.credibility) if rule == "soft" else np.ones(4)
    np.testing.assert_allclose(
        found.value, np.average(votes, axis=0, weights=trust * weights), rtol=1e-6
    )


@pytest.fixture(scope="module")
def bounded():
    return jax.jit(Credible(decay=0.0).combine)


class TestBounded:
    """What hostile workers gain that know the rule, in one round with a memory of none."""

    @pytest.mark.parametrize("deviation", [1.0, 0.5, 0.1])
    @pytest.mark.parametrize("attackers", [5, 10])
    def test_it_is_no_worse_than_the_mean(self, attackers, deviation, bounded, monkeypatch):
        monkeypatch.syspath_prepend(ROOT / "benchmarks")
        import hostile_votes

        draw = np.random.default_rng(4)
        theta = draw.normal(0, deviation, 4000)
        chances = (1 + np.tanh(1.5 * draw.normal(theta, 0.3, (WORKERS - attackers, 4000)))) / 2
        honest = np.where(draw.random(chances.shape) < chances, 1, -1)
        fresh = CredibleState(jnp.ones(WORKERS))
        for name, attack in hostile_votes.ATTACKS.items():
            hostile = np.broadcast_to(attack(honest, draw), (attackers, 4000))
            votes = np.concatenate([hostile, honest]).astype(np.float32)
            value, state = bounded(votes, jnp.ones(WORKERS), fresh)
            errors = [np.mean((x - honest.mean(0)) ** 2) for x in (value, votes.mean(0))]
            assert errors[0] < 1.001 * errors[1] + 1e-9, name
            if name == "inverted" and (attackers, deviation) != (10, 0.1):
                assert errors[0] < 1e-9  # They have no weight.
            assert state.credibility[attackers:].min() > 0.25, name

    def test_no_more_than_a_third_loses_its_weight(self, bounded):
        """13 of 31 contradict three quarters of the clear majorities: too many to be hostile."""
        votes = np.ones((WORKERS, 39_000), np.float32)
        element, worker = np.arange(39_000), np.arange(13)[:, None]
        votes[18:] = np.where((element + worker) % 13 < 3, 1, -1)
        value, state = bounded(votes, jnp.ones(WORKERS), CredibleState(jnp.ones(WORKERS)))
        assert (state.credibility[18:] < 0.25).all()
        np.testing.assert_allclose(value, votes.mean(0), atol=1e-6)

    def test_values_that_are_no_votes_do_not_enter(self, bounded):
        votes = np.where(RNG.random((WORKERS, 4000)) < 0.9, 1, -1).astype(np.float32)
        votes[0] = -1
        floats = RNG.normal(2, 1, (WORKERS, 4000)).astype(np.float32)
        floats[5] *= -1
        fresh = CredibleState(jnp.ones(WORKERS))
        alone = bounded(votes, jnp.ones(WORKERS), fresh)[1].credibility
        both = jax.jit(Credible(decay=0.0).combine)((votes, floats), jnp.ones(WORKERS), fresh)[1]
        np.testing.assert_array_equal(both.credibility, alone)
        assert alone[0] < 0.25 < 0.8 < alone[1:].min()


@pytest.mark.core("2", "3")
@pytest.mark.parametrize("workers", [1, 2, 3, 7, 16, 31, 65])
def test_medians_of_any_number_of_workers(workers):
    """By a network, and from 65 workers on by a sort."""
    rows = np.round(RNG.standard_normal((workers, 200)) * 4).astype(np.float32)
    value = combined(CoordinateMedian(), rows).value
    np.testing.assert_array_equal(value, np.median(rows, axis=0))


def test_wrong_settings_of_aggregates_are_refused():
    with pytest.raises(ValueError, match="`norm` must be a positive number"):
        ClippedMean(0)
    with pytest.raises(ValueError, match=r"`trim` must be below 0\.5"):
        TrimmedMean(0.5)
    with pytest.raises(ValueError, match="`trim` must be a number at least 0"):
        TrimmedMean(-0.1)
    with pytest.raises(ValueError, match="`decay` must be below 1"):
        Credible(decay=1.0)
    with pytest.raises(ValueError, match="`rule` must be one of"):
        Credible(rule="harder")
    for trusted in ((), [0], (0, 0), (-1,)):
        with pytest.raises(ValueError, match="`trusted` must"):
            Credible(trusted=trusted)
    with pytest.raises(ValueError, match=r"`trusted` must have numbers of the 31 workers"):
        combined(Credible(trusted=(31,)), HONEST)
    with pytest.raises(ValueError, match="`weights` must be one number for each message"):
        combined(Mean(), HONEST, jnp.ones(3))
    with pytest.raises(TypeError, match="is no hook of Aggregate"):

        class Sum(jaxcomp.Aggregate):
            def combined(self, messages, weights, state):
                return messages, state
