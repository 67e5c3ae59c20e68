"""What a sender encodes is what receivers decode, with the same noise, agreement and weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp
from jaxcomp.exchange import receive, send
from jaxcomp.exchange.plan import Plan
from jaxcomp.numerics import noise

WORKERS = 4
LIKE = {"w": jnp.zeros((5, 30)), "v": jnp.zeros((3, 64))}
"""150 and 192 elements: in buckets of 64, the last one of `w` is padded."""
KEY = noise.raw(3)
WEIGHTS = np.array([1, 0, 2, 0.5], np.float32)


def policy(codec):
    return jaxcomp.Policy(codec, min_size=0, min_ndim=0)


QSGD = policy(jaxcomp.qsgd_inf(bits=4, bucket_size=64))
SIGN = policy(jaxcomp.sign(bucket_size=64))
SHARED = policy(jaxcomp.terngrad(bucket_size=64, clip=None, shared=True))


def batches_of(codec, feedback=jaxcomp.NoFeedback()):
    return Plan.of(jaxcomp.Gather(jaxcomp.Link(codec, feedback)), LIKE, "data").batches


def drawn(batches, seed=0):
    rng = np.random.default_rng(seed)
    return [
        jnp.asarray(rng.standard_normal((WORKERS, *b.like.shape)), jnp.float32) for b in batches
    ]


def sent_by_all(batches, x, **settings):
    """What each worker sends, without memory of earlier steps."""

    def one(who, x):
        memory = send.Memory((), send.init(batches))
        return send.send(KEY, batches, tuple(x), memory, who, "data", **settings)

    return jax.jit(jax.vmap(one, axis_name="data"))(jnp.arange(WORKERS), x)


@pytest.fixture(scope="module")
def plain():
    batches = batches_of(QSGD)
    x = drawn(batches)
    return batches, x, sent_by_all(batches, x)


def test_a_message_is_the_gradient_and_what_was_not_sent():
    feedback = jaxcomp.Residual(decay=0.5)
    batches = batches_of(SIGN, feedback)
    x = tuple(row[0] for row in drawn(batches))
    held = feedback.init(x, x)._replace(residual=tuple(3 * row for row in x))
    memory = send.Memory(held, send.init(batches))
    alone = jax.jit(functools.partial(send.send, KEY, batches))
    found = jax.jit(functools.partial(send.send, KEY, batches, feedback=feedback))(
        x, memory, jnp.uint32(0)
    )
    for message, own in zip(found.message, x, strict=True):
        np.testing.assert_array_equal(message, 4 * own)
    again = alone(found.message, send.Memory((), memory.codecs), jnp.uint32(0))
    jax.tree.map(np.testing.assert_array_equal, again.payloads, found.payloads)


def test_padding_decodes_to_zero():
    """A sign has no zero, and a residual of padding would grow."""
    batches = batches_of(SIGN, jaxcomp.Residual())
    for batch, (sent, *_) in zip(batches, sent_by_all(batches, drawn(batches)).sent, strict=True):
        assert not batch.full
        real = np.arange(batch.size) < np.asarray(batch.counts())[:, None]
        assert (np.asarray(sent)[~real] == 0).all()
        assert (np.asarray(sent)[real] != 0).all()


def test_receivers_decode_what_the_sender_says_was_sent(plain):
    batches, _, found = plain
    each = jax.jit(functools.partial(receive.each, KEY, batches, workers=WORKERS))
    got = each(payloads=found.payloads, sides=found.sides)
    jax.tree.map(np.testing.assert_array_equal, got, found.sent)
    own = jax.tree.map(lambda x: x[2], found.payloads)
    again = jax.jit(functools.partial(send.decode, KEY, batches))(own, found.sides, jnp.uint32(2))
    jax.tree.map(np.testing.assert_array_equal, again, tuple(x[2] for x in found.sent))


def test_workers_and_batches_draw_different_noise(plain):
    batches, x, _ = plain
    same = [jnp.broadcast_to(row[:1], row.shape) for row in x]
    found = sent_by_all(batches, same)
    for sent in found.sent:
        assert len(np.unique(np.asarray(sent).reshape(WORKERS, -1), axis=0)) == WORKERS


def test_slices_are_numbered_one_worker_after_another():
    """Each worker encodes other buckets of one array, so their noise follows their numbers."""
    batches = batches_of(QSGD)
    x = drawn(batches)
    own, numbered = (sent_by_all(batches, x, first=first) for first in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b[0]), own.sent, numbered.sent)
    assert all((a[1] != b[1]).any() for a, b in zip(own.sent, numbered.sent, strict=True))
    for worker in range(WORKERS):
        payloads = jax.tree.map(lambda leaf, i=worker: leaf[i], numbered.payloads)
        again = send.decode(KEY, batches, payloads, numbered.sides, jnp.uint32(worker), first=True)
        for got, sent in zip(again, numbered.sent, strict=True):
            np.testing.assert_array_equal(got, sent[worker])


def test_a_worker_of_weight_zero_takes_no_part_in_an_agreement():
    """Its large message would enlarge the scale on which all workers agree."""
    batches = batches_of(SHARED)
    x = drawn(batches)
    loud = [row.at[1].mul(100.0) for row in x]

    def sent(x):
        def one(who, weight, x):
            memory = send.Memory((), send.init(batches))
            return send.send(KEY, batches, tuple(x), memory, who, "data", weight=weight)

        run = jax.vmap(one, axis_name="data")
        return jax.jit(run)(jnp.arange(WORKERS), jnp.asarray(WEIGHTS), x).sent

    for quiet, found in zip(sent(x), sent(loud), strict=True):
        np.testing.assert_array_equal(quiet[0], found[0])
        assert not found[1].any()  # It sends nothing itself.


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["all", "weighted"])
def test_a_mean_is_that_of_the_decoded_messages(weights, plain):
    batches, _, found = plain
    payloads = found.payloads
    if weights is not None:  # A payload of weight zero may be anything.
        payloads = jax.tree.map(
            lambda p: p.at[1].set(jnp.nan) if p.dtype == jnp.float32 else p, payloads
        )
    given = None if weights is None else jnp.asarray(weights)
    got = receive.mean(KEY, batches, payloads, found.sides, given, WORKERS)
    total = receive.mean(KEY, batches, payloads, found.sides, given, WORKERS, over="one")
    factors = np.ones(WORKERS) if weights is None else weights
    for mean, whole, sent in zip(got, total, found.sent, strict=True):
        want = np.einsum("w,w...->...", factors, np.asarray(sent, np.float64))
        np.testing.assert_allclose(whole, want, atol=1e-5)
        np.testing.assert_allclose(mean, want / WORKERS, atol=1e-5)


def test_a_mean_over_senders_divides_by_those_who_sent_the_element():
    batches = batches_of(policy(jaxcomp.top_k(0.1)), jaxcomp.Residual())
    found = sent_by_all(batches, drawn(batches))
    got = receive.mean(KEY, batches, found.payloads, found.sides, None, WORKERS, over="senders")
    for mean, sent in zip(got, found.sent, strict=True):
        senders = np.maximum((np.asarray(sent) != 0).sum(0), 1)
        assert senders.max() > 1
        np.testing.assert_allclose(mean, np.asarray(sent).sum(0) / senders, atol=1e-6)


@dataclasses.dataclass(frozen=True)
class Seeds(jaxcomp.Codec):
    """Sends nothing, and decodes to the seed of each bucket's noise."""

    bucket_size: int = 64
    unbiased = True

    def encode(self, key, x, count, state):
        return jnp.zeros(len(x)), state

    def decode(self, key, payload, like, side=None):
        seeds = noise.seeds(key.own, key.first, like.shape[0])[0] >> 8  # Exact in float32.
        return jnp.broadcast_to(seeds[:, None], like.shape).astype(like.dtype)


def test_buckets_of_a_part_are_numbered_from_its_first():
    """The receiver of some rows decodes them with the noise of their places in the whole."""
    batches = batches_of(policy(Seeds()))
    (batch,) = batches
    payloads = (jnp.zeros((WORKERS, batch.buckets)),)
    (whole,), (part,) = (
        jax.jit(functools.partial(receive.each, KEY, batches, workers=WORKERS, first=first))(
            payloads=payloads, sides=(None,)
        )
        for first in (None, (2,))
    )
    seeds, moved = whole[..., 0], part[..., 0]
    assert len(np.unique(seeds)) == seeds.size
    np.testing.assert_array_equal(moved[:, :-2], seeds[:, 2:])
