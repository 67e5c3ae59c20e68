"""Trees with names and types that the library uses for its own nodes, and words that are data."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from helpers import methods

import jaxcomp
from jaxcomp.backend import axes
from jaxcomp.mesh import per_worker

NAMES = ["per_worker", "per_worker_share", "per_shard:data", "residual", "mirror", "everyones", "0"]
"""Names of nodes, and fields, of memory."""


class Fields(NamedTuple):
    """Parameters with the fields and attributes of states."""

    averages: Any
    carried: Any
    check_resizable: Any
    offset: Any
    everyones: Any
    mirror: Any
    step: Any


@struct.dataclass
class Record:
    per_worker: Any
    everyones: Any
    averages: bool = struct.field(pytree_node=False, default=True)


class Model(nnx.Module):
    """Names at every place of an nnx object."""

    def __init__(self):
        self.per_worker = nnx.Param(rows(0))
        self.mirror = nnx.Dict(per_worker_share=nnx.Param(rows(1)))


def rows(number):
    """As many rows as workers, so that splitting them is possible."""
    return jnp.arange(32.0).reshape(8, 4) + number


CASES = {
    "dicts": {name: {"w": rows(n)} for n, name in enumerate(NAMES)},
    "fields": Fields(*map(rows, range(7))),
    "records": [Record({"per_worker": rows(0)}, rows(1)), [Record(rows(2), rows(3))]],
}
WORDS = jnp.arange(16, dtype=jnp.uint32).reshape(8, 2)


def transformation():
    """Residuals both ways, and the moments of Adam, whose paths end with those of parameters."""
    link = jaxcomp.Link(jaxcomp.Policy(jaxcomp.sign(bucket_size=8), min_size=0), jaxcomp.Residual())
    mean = jaxcomp.compressed_mean(jaxcomp.TwoShot(link, link), "data")
    return optax.chain(jaxcomp.per_worker(optax.trace(0.5)), mean, optax.adam(1e-2))


def trained(tx, params, state, words, x):
    """A step, with words that look like keys; the parameters are also returned as metrics."""

    def loss_fn(params, key, keys, x):
        scale = x[0] * (keys["per_shard:data"].sum() + key.sum())
        return sum(jnp.mean(leaf) for leaf in jax.tree.leaves(params)) * scale

    args = (params, words["per_shard:data"][1], words, x)
    loss, grads = jaxcomp.value_and_grad(loss_fn, "data")(*args)
    updates, state = tx.update(grads, state, params)
    metrics = {"per_worker": loss, "per_worker_share": params, "everyones": words}
    return optax.apply_updates(params, updates), state, metrics


@pytest.mark.core("fields")
@pytest.mark.parametrize("name", CASES)
def test_names_of_a_tree_have_no_meaning(name, mesh):
    """The same leaves in a list train alike, bit for bit, and lie on the mesh alike."""
    params, tx, found = CASES[name], transformation(), []
    for tree in (params, jax.tree.leaves(params)):
        tree = jaxcomp.place(tree, mesh, "data")
        assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(tree))
        state = jaxcomp.init_state(tx, tree, mesh, "data")
        step = jaxcomp.data_parallel(lambda *args: trained(tx, *args), mesh, "data")
        words = {"per_shard:data": WORDS}
        moved, state, metrics = step(tree, state, words, jnp.arange(1.0, 9))
        want = 4.5 * (WORDS.sum() + WORDS[1].sum()) * sum(map(jnp.mean, jax.tree.leaves(params)))
        np.testing.assert_allclose(metrics["per_worker"], want, rtol=1e-6)
        np.testing.assert_array_equal(metrics["everyones"]["per_shard:data"], WORDS)
        smaller = jaxcomp.resize_workers(tx, state, tree, 3)
        found.append(jax.tree.leaves((moved, state, metrics, smaller)))
        shapes = [x.shape for x in jax.tree.leaves((moved, metrics["per_worker_share"]))]
        assert shapes == [x.shape for x in jax.tree.leaves((params, params))]
        assert jax.tree.structure(moved) == jax.tree.structure(tree)
    for got, want in zip(*found, strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.sharding.is_equivalent_to(want.sharding, got.ndim)


def test_names_in_nnx_objects(mesh):
    """The state of an nnx optimizer consists of plain mappings, whose keys still mark memory."""
    model, tx = Model(), transformation()
    optimizer = nnx.Optimizer(model, jaxcomp.on_mesh(tx, mesh, "data"), wrt=nnx.Param)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(nnx.state(optimizer))]
    marked = [jax.tree_util.keystr(path) for path in paths if per_worker.marked(path)]
    assert len(marked) == 4  # Both residuals, and the trace of each parameter.
    assert all("'memory'" in path or "'trace'" in path for path in marked)

    def step(model, optimizer, x):
        loss, grads = jaxcomp.value_and_grad(
            lambda m, x: m.per_worker[...].sum() * x[0] + m.mirror["per_worker_share"].sum(), "data"
        )(model, x)
        optimizer.update(model, grads)
        return loss, {"per_worker": nnx.state(model)}

    run = jaxcomp.data_parallel(step, mesh, "data")
    loss, metrics = run(model, optimizer, jnp.ones(8))
    np.testing.assert_allclose(loss, rows(0).sum() + rows(1).sum())
    assert {x.shape for x in jax.tree.leaves((nnx.state(model), metrics))} == {(8, 4)}
    np.testing.assert_allclose(model.per_worker[...], rows(0) - 0.01, atol=1e-6)


def test_an_offset_in_moments_is_no_displacement():
    """`view` adds the offsets of methods, not the moments of a parameter called `offset`."""
    params = CASES["fields"]
    state = optax.sgd(0.1, momentum=0.9).init(params)
    state = jax.tree.map(lambda x: x + 1, state)
    assert jax.tree.all(jax.tree.map(np.array_equal, jaxcomp.view(params, state), params))


@pytest.mark.parametrize("name", [*methods.METHODS, *methods.GOSSIP, "fragments"])
def test_python_numbers_are_parameters(name):
    """The state of a number is that of a scalar array."""
    settings = {"every": 20, "fragments": 2, "inner": optax.sgd(0.1)}
    if name == "fragments":
        tx = jaxcomp.algorithms.streaming_diloco(jaxcomp.Dense(), "data", **settings)
    else:
        tx = methods.build(name)
    with axes.assume_workers(4):
        found = [
            jax.eval_shape(lambda s=s: tx.init({"w": jnp.ones((32, 32)), "s": s}))
            for s in (2.0, jnp.float32(2))
        ]
    assert jax.tree.structure(found[0]) == jax.tree.structure(found[1])
    for got, want in zip(*map(jax.tree.leaves, found), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
