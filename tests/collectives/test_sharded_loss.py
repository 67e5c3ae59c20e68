"""Losses of sharded models that would train wrongly without an error, and those that are right."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import jaxcomp

KEYS = jax.random.split(jax.random.key(0), 4)
PARAMS = {
    "blocks": {"w": jax.random.normal(KEYS[0], (2, 32, 32)) / 6},
    "head": {"w": jax.random.normal(KEYS[1], (32, 16)) / 6},
}
SPECS = {"blocks": P(None, "fsdp"), "head": P("fsdp")}
X, Y = jax.random.normal(KEYS[2], (64, 32)), jax.random.normal(KEYS[3], (64, 16))
MASK = jnp.float32(jnp.arange(64) % 9 > jnp.arange(64) // 8)
"""Every worker counts another number of examples."""


def network(params, x):
    @jax.checkpoint
    def layer(x, own):
        return jnp.tanh(x @ jaxcomp.gathered(own)["w"]), None

    x, _ = lax.scan(layer, x, params["blocks"])
    return x @ jaxcomp.gathered(params["head"])["w"]


def errors(params, x, y):
    """One for each example."""
    return jnp.mean((network(params, x) - y) ** 2, axis=1)


def sharded(loss, typed=True, **settings):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    parts = {"stacked": ("blocks/*",), "inside": ("head/*",), "check_vma": typed, **settings}
    return jaxcomp.fully_sharded(loss, mesh, "fsdp", SPECS, weights=None, **parts)


def trace(loss, typed=True, **settings):
    """Where mistakes are found: nothing is compiled."""
    return jax.eval_shape(sharded(loss, typed, **settings), PARAMS, X, Y, MASK, key=0)


def plain(params, x, y, mask):
    return jnp.mean(errors(params, x, y))


OF_PARTS = {
    "norm": lambda p, *batch: plain(p, *batch) + optax.tree.norm(p),
    "penalty": lambda p, *batch: plain(p, *batch) + sum(jnp.sum(x**2) for x in jax.tree.leaves(p)),
    "inside alone": lambda p, *batch: plain(p, *batch) + optax.tree.norm(p["head"]),
    "condition": lambda p, *batch: jnp.where(optax.tree.norm(p) > 1, plain(p, *batch), 0),
    "branch": lambda p, *batch: lax.cond(
        optax.tree.norm(p) > 1, lambda: plain(p, *batch), lambda: 0 * batch[0].sum()
    ),
    "loop": lambda p, *batch: (
        plain(p, *batch)
        + lax.scan(
            lambda c, own: (c + optax.tree.norm(own), None), 0 * batch[0].sum(), p["blocks"]
        )[0]
    ),
}


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize("name", OF_PARTS)
def test_no_loss_computes_with_parts_or_their_keys(name, typed):
    with pytest.raises(ValueError, match=r"must be made whole where .*test_sharded_loss"):
        trace(OF_PARTS[name], typed)


def test_nor_does_what_it_returns_beside_its_value():
    def logged(p, *batch):
        return plain(p, *batch), {"norm": optax.tree.norm(p)}

    with pytest.raises(ValueError, match="`params` must be made whole where the loss uses them"):
        trace(logged, has_aux=True)


@pytest.mark.parametrize("cast", [jnp.bfloat16, jnp.int32])
def test_parts_are_cast_after_they_are_whole(cast):
    def narrow(p, *batch):
        return plain(jax.tree.map(lambda x: x.astype(cast), p), *batch)

    with pytest.raises(ValueError, match="`tree` must hold parts as the loss got them, got "):
        trace(narrow)


def count(mask):
    return lax.psum(mask.sum(), "fsdp")


SHRUNK = {
    "sum over psum": lambda e, m: jnp.sum(e * m) / count(m),
    "guarded": lambda e, m: jnp.sum(e * m) / jnp.maximum(count(m), 1.0) + jnp.mean(e),
    "times an inverse": lambda e, m: 0.5 * jnp.vdot(e, m) * (1 / (count(m) + 1e-6)),
    "power": lambda e, m: jnp.sum(e * m) * count(m) ** -1,
    "each example": lambda e, m: jnp.sum(e * (m / count(m))),
    "gathered counts": lambda e, m: jnp.sum(e * m) / lax.all_gather(m.sum(), "fsdp").sum(),
    "number of all examples": lambda e, m: jnp.sum(e) / lax.psum(e.size, "fsdp"),
    "in a loop": lambda e, m: lax.fori_loop(
        0, 3, lambda i, c: c + jnp.sum(e * m) / count(m), 0 * e.sum()
    ),
}
N = 8
RIGHT = {
    "plain": lambda e, m: jnp.mean(e),
    "weighted": lambda e, m: jnp.sum(e * m) * lax.axis_size("fsdp") / count(m),
    "weighted afterwards": lambda e, m: jnp.sum(e * m) / count(m) * N,
    "weighted in a loop": lambda e, m: lax.scan(
        lambda c, row: (c + row * N, None), 0 * e.sum(), e * m
    )[0] / count(m),
    "mean count": lambda e, m: jnp.sum(e * m) / lax.pmean(m.sum(), "fsdp"),
    "share of examples": lambda e, m: (jnp.sum(e * m) / m.sum()) * (m.sum() * N / count(m)),
    "statistics of all": lambda e, m: jnp.mean(
        jnp.tanh(e - lax.psum(jnp.sum(e * m), "fsdp") / count(m))
    ),
    "softmax over all": lambda e, m: -jnp.mean(
        jnp.log(jnp.exp(e) / lax.psum(jnp.exp(e).sum(), "fsdp"))
    ),
    "two means": lambda e, m: jnp.mean(jnp.sum(e.reshape(-1, 4), 1) / 4) / 8,
    "odd constants": lambda e, m: jnp.mean(
        jnp.where(m > 0, e / 1e-45, -jnp.inf) * 0 + jnp.where(m > 2, e / 0.0, e)
    ),
    "squares": lambda e, m: jnp.mean((e / lax.psum(m.sum(), "fsdp") - e) ** 2),
}  # fmt: skip


def of_errors(f):
    return lambda p, x, y, mask: f(errors(p, x, y), mask)


@pytest.mark.parametrize("name", SHRUNK)
def test_sums_over_own_examples_are_not_divided_by_those_of_all(name):
    for typed in (True, False):
        with pytest.raises(ValueError, match=r"sum over it.*test_sharded_loss.*axis_size\('fsdp"):
            trace(of_errors(SHRUNK[name]), typed)


@pytest.mark.parametrize("name", RIGHT)
def test_right_losses_are_taken_without_a_word(name, recwarn):
    for typed in (True, False):
        trace(of_errors(RIGHT[name]), typed)
    assert not recwarn.list


@pytest.mark.parametrize("typed", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_mean_over_unequal_counts(typed):
    """The line of the message is the mean over all examples; the mean of means is not."""

    def of_all(params):
        return jnp.sum(errors(params, X, Y) * MASK) / MASK.sum()

    value, grads = jax.value_and_grad(of_all)(PARAMS)
    got = sharded(of_errors(RIGHT["weighted"]), typed)(PARAMS, X, Y, MASK, key=0)
    np.testing.assert_allclose(got[0], value, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(got[1]), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    for own in (lambda e, m: jnp.sum(e * m) / m.sum(), lambda e, m: jnp.mean(e, where=m > 0)):
        with pytest.raises(ValueError, match=r"count of this worker.*test_sharded_loss"):
            trace(of_errors(own), typed)


def beside(total, mean):
    """A loss and a tree of every kind that is taken; of all workers by these two functions."""

    def loss(p, x, y, mask):
        e = errors(p, x, y)
        return jnp.mean(e), {
            "number": 3,
            "kind": jnp.bool_(True),
            "count": total(jnp.sum(e > 1)),
            "accuracy": jnp.mean(e > 1),
            "mean of masked": mean(jnp.sum(e * mask)) / mean(mask.sum()),
            "rows": (e, [e > 1]),
            "weights": jaxcomp.gathered(p["head"])["w"],
            "any": jnp.any(jaxcomp.gathered(p["head"])["w"] > 1),
            "nothing": None,
        }

    return loss


@pytest.mark.parametrize("typed", [True, False])
def test_what_a_loss_returns_beside_its_value_is_that_of_the_whole_batch(typed):
    want = jax.value_and_grad(beside(lambda x: x, lambda x: x), has_aux=True)(PARAMS, X, Y, MASK)
    of_workers = beside(lambda x: lax.psum(x, "fsdp"), lambda x: lax.pmean(x, "fsdp"))
    got = sharded(of_workers, typed, has_aux=True)(PARAMS, X, Y, MASK, key=0)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jnp.result_type(one) == jnp.result_type(other)
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


MIXED = {
    "count": lambda p, x, mask: jnp.sum(mask > 0),
    "truth": lambda p, x, mask: jnp.all(mask > 0),
    "features": lambda p, x, mask: x.mean(0),
    "floating count": lambda p, x, mask: mask.sum(),
    "right ones": lambda p, x, mask: -jnp.sum((network(p, x)[:, 0] > 0) * mask),
    "shrunk": lambda p, x, mask: jnp.vdot(network(p, x)[:, 0], mask) / count(mask),
}


@pytest.mark.parametrize("name", MIXED)
def test_nor_are_counts_averaged_or_features_mixed(name):
    def logged(p, x, y, mask):
        return plain(p, x, y, mask), {"found": MIXED[name](p, x, mask)}

    for typed in (True, False):
        with pytest.raises(ValueError, match=r"`loss_fn` must return .*psum"):
            trace(logged, typed, has_aux=True)


def test_one_worker_has_all_examples():
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    f = jaxcomp.fully_sharded(
        of_errors(SHRUNK["sum over psum"]), mesh, "fsdp", P(), weights=None, stacked=("blocks/*",)
    )
    jax.eval_shape(f, PARAMS, X, Y, MASK, key=0)
