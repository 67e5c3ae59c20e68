"""The public checks find errors in codecs that are wrong on purpose."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import jaxcomp
from jaxcomp import testing
from jaxcomp.base import Combine, Feedback, Move, WrappedFeedback, WrappedReducer
from jaxcomp.exchange.combines import Average, Join
from jaxcomp.exchange.moves import AllGather
from jaxcomp.numerics import addition, noise
from jaxcomp.testing import facts as facts_


class HalfPayload(NamedTuple):
    values: jax.Array


def rounded(x, dtype):
    """What is finite stays finite."""
    largest = addition.limit(dtype)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x).astype(dtype)


class Half(jaxcomp.Codec, abstract=True):
    """A correct codec: bfloat16, rounded to nearest."""

    bucket_size = 128
    unbiased = False
    facts = jaxcomp.base.Facts(bits_per_element=16)

    def encode(self, key, x, count, state):
        return HalfPayload(rounded(x.astype(jnp.float32), jnp.bfloat16)), state

    def decode(self, key, payload, like, side=None):
        return rounded(payload.values.astype(jnp.float32), like.dtype)


@dataclasses.dataclass(frozen=True)
class Good(Half):
    """As it should be."""


@dataclasses.dataclass(frozen=True)
class Biased(Half):
    """Shrinks and says that it is unbiased."""

    unbiased = True

    def encode(self, key, x, count, state):
        return HalfPayload((x * 0.9375).astype(jnp.bfloat16)), state


@dataclasses.dataclass(frozen=True)
class Larger(Half):
    """Claims eight bits and sends sixteen."""

    facts = jaxcomp.base.Facts(bits_per_element=8)


@dataclasses.dataclass(frozen=True)
class Hiding(Half):
    """Turns NaN and Inf into numbers."""

    def encode(self, key, x, count, state):
        return HalfPayload(rounded(jnp.nan_to_num(x), jnp.bfloat16)), state


CALLS = []


@dataclasses.dataclass(frozen=True)
class Moody(Half):
    """Depends on how often it was called."""

    def encode(self, key, x, count, state):
        CALLS.append(0)
        return HalfPayload((x * (1 + len(CALLS) % 2)).astype(jnp.bfloat16)), state


@dataclasses.dataclass(frozen=True)
class Expanding(Half):
    """Sends four times the gradient."""

    def decode(self, key, payload, like, side=None):
        values = payload.values.astype(jnp.float32)
        largest = addition.limit(like.dtype)
        four = jnp.where(jnp.isfinite(values), jnp.clip(4 * values, -largest, largest), values)
        return four.astype(like.dtype)


@dataclasses.dataclass(frozen=True)
class Offset(Half):
    """Zero does not stay zero."""

    def decode(self, key, payload, like, side=None):
        values = payload.values.astype(jnp.float32)
        return jnp.where(values == 0, 0.25, values).astype(like.dtype)


@dataclasses.dataclass(frozen=True)
class Lifted(Half):
    """Zero does not stay zero beside other elements, and it says that it does."""

    facts = jaxcomp.base.Facts(keeps_zeros=True)

    def decode(self, key, payload, like, side=None):
        values = payload.values.astype(jnp.float32)
        lift = jnp.abs(values).max(1, keepdims=True) / 256
        return rounded(jnp.where(values == 0, lift, values), like.dtype)


@dataclasses.dataclass(frozen=True)
class Unsummed(Half):
    """Its own sum is the mean."""

    def decode_sum(self, keys, payloads, like, weights=None, side=None):
        return payloads.values.astype(jnp.float32).mean(0)


@dataclasses.dataclass(frozen=True)
class Flat(Half):
    """Forgets the buckets axis."""

    def encode(self, key, x, count, state):
        return HalfPayload(x.reshape(-1).astype(jnp.bfloat16)), state

    def decode(self, key, payload, like, side=None):
        return payload.values.reshape(like.shape).astype(like.dtype)


@dataclasses.dataclass(frozen=True)
class Placed(Half):
    """Draws noise by the place in the array, whatever the number of its first bucket."""

    def encode(self, key, x, count, state):
        seeds = noise.seeds(key.own, jnp.uint32(0), x.shape[0])
        up = noise.below(
            8, *(part[:, None] for part in seeds), jnp.arange(x.shape[1], dtype=jnp.uint32)[None]
        )
        return HalfPayload((x * jnp.where(up > 127, 1, 0.875)).astype(jnp.bfloat16)), state


@dataclasses.dataclass(frozen=True)
class Misread(Half):
    """Encodes by the number, and decodes by the place."""

    def encode(self, key, x, count, state):
        return HalfPayload((x * self._turned(key, x.shape)).astype(jnp.bfloat16)), state

    def decode(self, key, payload, like, side=None):
        turned = self._turned(key._replace(first=jnp.uint32(0)), like.shape)
        return (payload.values * turned).astype(like.dtype)

    def _turned(self, key, shape):
        seeds = noise.seeds(key.own, key.first, shape[0])
        up = noise.below(
            8, *(part[:, None] for part in seeds), jnp.arange(shape[1], dtype=jnp.uint32)[None]
        )
        return jnp.where(up > 127, 1, -1).astype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Overflowing(Half):
    """The largest float32 is finite, the largest float16 is rounded up to infinity."""

    def decode(self, key, payload, like, side=None):
        return payload.values.astype(like.dtype)


@dataclasses.dataclass(frozen=True)
class Coarse(Half):
    """Nothing but zero is smaller than 1e-32."""

    def encode(self, key, x, count, state):
        tiny = (x != 0) & (jnp.abs(x) < 1e-32)
        x = jnp.where(tiny, 1e-32 * jnp.sign(x), x).astype(jnp.float32)
        return HalfPayload(rounded(x, jnp.bfloat16)), state


@dataclasses.dataclass(frozen=True)
class Secret(Half):
    """Agrees on something, and does not say so."""

    @property
    def facts(self):
        return jaxcomp.base.Facts(bits_per_element=16)

    def agree(self, key, x, count, state, axis_name):
        return jax.lax.pmax(jnp.abs(x).max(), axis_name)


@dataclasses.dataclass(frozen=True)
class Sideless(Half):
    """Says that decoders need side information, and has none."""

    @property
    def facts(self):
        return jaxcomp.base.Facts(bits_per_element=16, sided=True)


def declaring(name, **declared):
    """A codec like `Good` that declares something else."""
    facts = declared.pop("facts", {})
    held = jaxcomp.base.Facts(bits_per_element=16, **facts)
    made = type(name, (Half,), {"facts": held, "__module__": __name__, **declared})
    return dataclasses.dataclass(frozen=True)(made)()


def widened(self, key, x, count, state):
    return HalfPayload(rounded(x.astype(jnp.float32), jnp.bfloat16)), state.astype(jnp.float32) + 1


def uneven(self, key, payload, like, side=None):
    """Shrinks negative elements, so the decoded sum is not the sum of the decoded."""
    values = payload.values.astype(jnp.float32)
    return rounded(jnp.where(values < 0, 0.75 * values, values), like.dtype)


FALSE = {
    "Linear": ({"linear": True, "decode": uneven}, facts_.assert_adds_up, "must be linear"),
    "Sharp": (
        {"variance_bound": lambda self, size, peak=None: 1e-9, "unbiased": True},
        facts_.assert_within_bounds,
        "declares variance_bound",
    ),
    "Exact": ({"facts": {"worst": 1e-6}}, facts_.assert_within_bounds, "declares worst=1e-06"),
    "Restless": (
        {"init": lambda self, like: jnp.zeros(3, jnp.int32), "encode": widened},
        facts_.assert_keeps_state,
        "must keep its state",
    ),
    "Spanning": (
        {
            "facts": {"span": 1e6},
            "encode": lambda self, key, x, count, state: (
                HalfPayload(jnp.where(jnp.abs(x) > 1e-3, x, 0).astype(jnp.bfloat16)),
                state,
            ),
        },
        facts_.assert_spans,
        "declares span",
    ),
    "Guided": (
        {
            "facts": {"guided": True},
            "decode": lambda self, key, payload, like, side=None: (
                payload.values.astype(like.dtype) + (0 if side is None else 1)
            ),
            "side": lambda self, agreed: agreed if jax.tree.leaves(agreed) else None,
        },
        facts_.assert_reads_guesses,
        "declares guided",
    ),
    "Clipping": (
        {
            "facts": {"clips": True},
            "clipped": lambda self, key, x, count: jnp.stack([2 * count, count], axis=1),
        },
        facts_.assert_counts_clipped,
        "counts",
    ),
    "Naming": (
        {
            "facts": {"names_senders": True},
            "mean_of_senders": lambda self, keys, payloads, like, weights=None: (
                payloads.values.astype(jnp.float32).mean(0)
            ),
        },
        facts_.assert_names_senders,
        "must be the mean over those that sent",
    ),
}
"""Codecs that declare something false, by the check that finds it."""


@pytest.mark.parametrize("name", FALSE)
def test_false_facts_are_found(name):
    declared, check, said = FALSE[name]
    if name == "Guided":
        declared = declared | {"facts": {"guided": True, "sided": True}}
    codec = declaring(name, **declared)
    arguments = () if check in (facts_.assert_adds_up, facts_.assert_spans) else (X,)
    check(Good(), *arguments)
    with pytest.raises(AssertionError, match=said):
        check(codec, *arguments)


X = jax.random.normal(jax.random.key(3), (300,))


@dataclasses.dataclass
class Unhashable(Half):
    """Not frozen, so equal ones would not share a compilation."""


def test_a_good_codec_passes():
    testing.check_codec(Good())


@pytest.mark.core("Linear-str", "Biased-str", "Moody-str", "Lifted-str", "Misread-str", "Flat-str")
@pytest.mark.parametrize(
    ("codec", "said"),
    [
        (Biased(), "must be unbiased"),
        (Larger(), "a larger payload than declared"),
        (Hiding(), "hides nan"),
        (Moody(), "must give the same bits"),
        (Expanding(), "must be contractive"),
        (Offset(), "must decode zeros to zeros"),
        (Lifted(), "has keeps_zeros=True, but decodes 129 of 129 zeros"),
        (Unsummed(), "must be the sum of decode"),
        (Placed(), "key.first"),
        (Misread(), "key.first"),
        (Overflowing(), "the largest float16"),
        (Coarse(), "must be contractive for inputs of 1e-35"),
        (Flat(), "leading axis of 6 buckets"),
        (Secret(), "must have agrees=True, since agree changes its state"),
        (Sideless(), "must have sided=False, since it does not define side"),
        (Unhashable(), "must be hashable by value"),
        *((declaring(name, **FALSE[name][0]), FALSE[name][2]) for name in ("Linear", "Exact")),
        ("qsgd", "a codec must derive from jaxcomp.Codec"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_wrong_codecs_fail(codec, said):
    with pytest.raises(AssertionError, match=said):
        testing.check_codec(codec)


def test_a_tiny_bias_is_found():
    """One percent too large, on average: six standard errors see it."""

    @dataclasses.dataclass(frozen=True)
    class Generous(Half):
        unbiased = True

        def decode(self, key, payload, like, side=None):
            return (1.01 * payload.values.astype(jnp.float32)).astype(like.dtype)

    with pytest.raises(AssertionError, match="must be unbiased"):
        testing.assert_unbiased(Generous(), jnp.linspace(-1, 1, 64))


@pytest.mark.full
def test_reducers_and_feedbacks_pass():
    for reducer in (
        jaxcomp.Dense(),
        jaxcomp.Gather(jaxcomp.qsgd_inf(bits=4)),
        jaxcomp.Gather(jaxcomp.Link(jaxcomp.top_k(fraction=0.1), jaxcomp.Residual())),
        jaxcomp.Gossip(jaxcomp.qsgd_inf(bits=4)),
        jaxcomp.Gossip(jaxcomp.Link(jaxcomp.top_k(fraction=0.1), jaxcomp.Shift())),
        jaxcomp.Gossip(jaxcomp.qsgd_inf(bits=4), jaxcomp.graphs.OnePeer()),
    ):
        testing.check_reducer(reducer)
    testing.check_reducer(jaxcomp.Dense("bfloat16"), tolerance=2e-2)
    for feedback in (
        jaxcomp.NoFeedback(),
        jaxcomp.Residual(),
        jaxcomp.Residual(decay=0.5, dtype="bfloat16"),
    ):
        testing.check_feedback(feedback)


def test_wrong_feedbacks_and_reducers_fail():
    @dataclasses.dataclass(frozen=True)
    class Doubling(WrappedFeedback):
        feedback: Feedback = jaxcomp.NoFeedback()

        def update(self, message, sent, part, share, weight, state):
            return jax.tree.map(lambda p: 2 * p, part), state

    with pytest.raises(AssertionError, match="must return the mean of its inputs"):
        testing.check_feedback(Doubling())

    @dataclasses.dataclass(frozen=True)
    class Forgetful(WrappedFeedback):
        feedback: Feedback = jaxcomp.Residual()

        def update(self, message, sent, part, share, weight, state):
            return part, jax.tree.map(jnp.zeros_like, state)

    with pytest.raises(AssertionError, match="must lose nothing"):
        testing.check_feedback(Forgetful())

    @dataclasses.dataclass(frozen=True)
    class Poisoned(WrappedFeedback):
        feedback: Feedback = jaxcomp.Residual()

        def update(self, message, sent, part, share, weight, state):
            memory = jax.tree.map(lambda e: 1e30 * (e + jnp.ones_like(e)), state)
            return part, jax.tree.map(lambda e: e * e, memory)

        def compensate(self, x, state):
            return x, state

    with pytest.raises(AssertionError, match="must keep its memory finite"):
        testing.check_feedback(Poisoned())

    two_shots = jaxcomp.TwoShot(jaxcomp.qsgd_inf(bits=4))
    up, down = two_shots.route
    doubled = overriding(two_shots, route=(up, dataclasses.replace(down, combine=Loud(Join()))))
    with pytest.raises(AssertionError, match="returns another mean than it reduced"):
        testing.check_reducer(doubled)
    with pytest.raises(AssertionError, match="check an instance"):
        testing.check_feedback(jaxcomp.Residual)

    loud = overriding(two_shots, route=(dataclasses.replace(up, combine=Loud(Average())), down))
    with pytest.raises(AssertionError, match=r"breaks the law pmean\(sent\) == part"):
        testing.check_reducer(loud)


@dataclasses.dataclass(frozen=True)
class Loud(Combine):
    """Twice the result of another combination."""

    inner: Combine

    @property
    def takes(self):
        return self.inner.takes

    def run(self, stage, key, heard, sent, state):
        got = self.inner.run(stage, key, heard, sent, state)
        return got._replace(value=tuple(2 * x for x in got.value))


@dataclasses.dataclass(frozen=True)
class Boasting(Move):
    """An all-gather that declares a million bytes."""

    def run(self, stage, key, sent, weight, state):
        return AllGather().run(stage, key, sent, weight, state)

    def link_bytes(self, stage):
        return 10**6 * (stage.workers - 1)

    def messages(self, stage):
        return AllGather().messages(stage)


def overriding(base, **members):
    """A wrapper of a feedback or a reducer with other members."""
    wrapper = WrappedFeedback if isinstance(base, Feedback) else WrappedReducer
    name = "feedback" if isinstance(base, Feedback) else "reducer"
    kind = {"__annotations__": {name: wrapper.__annotations__[name]}, "__module__": __name__}
    return dataclasses.dataclass(frozen=True)(type("Other", (wrapper,), kind | members))(base)


def facts_of(part, **changed):
    return {"facts": dataclasses.replace(part.facts, **changed)}


def deaf(self, message, sent, part, share, weight, state):
    return self.feedback.update(message, sent, part, share, None, state)


def grown(self, message, sent, part, share, weight, state):
    estimate, after = self.feedback.update(message, sent, part, share, weight, state)
    return estimate, jax.tree.map(lambda x: 9 * x, after)


def longer_in_slices(self, message, sent, part, share, weight, state):
    return jax.tree.map(lambda p: p + (p.shape == (3, 5)), part), state


RESIDUAL, SHIFT, NOTHING = jaxcomp.Residual(), jaxcomp.Shift(), jaxcomp.NoFeedback()


@pytest.mark.parametrize(
    ("feedback", "said"),
    [
        (overriding(RESIDUAL, update=deaf), "must not ignore `weight`"),
        (overriding(jaxcomp.Residual(decay=0.5), update=grown), "must have bounded=False"),
        (overriding(RESIDUAL, **facts_of(RESIDUAL, memory=False)), "memory=True"),
        (overriding(RESIDUAL, **facts_of(RESIDUAL, mirrors=True)), "mirrors=False"),
        (overriding(SHIFT, **facts_of(SHIFT, mirrors=False)), "mirrors=True"),
        (overriding(RESIDUAL, **facts_of(RESIDUAL, keeps_unsent=False)), "keeps_unsent=True"),
        (overriding(NOTHING, **facts_of(NOTHING, conserves=True)), "keeps_unsent=True"),
        (overriding(NOTHING, **facts_of(NOTHING, forgets_absent=True)), "mirrors=True"),
        (overriding(RESIDUAL, **facts_of(RESIDUAL, accelerates=True)), "accelerates=False"),
        (overriding(NOTHING, update=longer_in_slices), "needs_mean=True"),
        (overriding(SHIFT, known=lambda self, sent, state: sent), "`known` must be the input"),
    ],
)
def test_false_facts_of_a_feedback_are_found(feedback, said):
    with pytest.raises(AssertionError, match=said):
        testing.check_feedback(feedback)


QSGD = jaxcomp.Gather(jaxcomp.qsgd_inf(bits=4))


@pytest.mark.parametrize(
    ("reducer", "said"),
    [
        (
            overriding(QSGD, route=(dataclasses.replace(QSGD.route[0], move=Boasting()),)),
            "says 3000000",
        ),
        (overriding(QSGD, **facts_of(QSGD, excludes=True)), "must have excludes=False"),
        (overriding(QSGD, **facts_of(QSGD, dtype="bfloat16")), "dense leaves are sent in"),
        (overriding(QSGD, **facts_of(QSGD, splits=True)), "with splits=True the part"),
    ],
)
def test_false_facts_of_a_reducer_are_found(reducer, said):
    with pytest.raises(AssertionError, match=said):
        testing.check_reducer(reducer)
