"""States for any number of workers, with random memory, and their unsent content."""

import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.backend import axes
from jaxcomp.base import Mirrored
from jaxcomp.exchange.legs import LegState
from jaxcomp.exchange.state import ReductionState
from jaxcomp.feedback import MomentumState, ResidualState
from jaxcomp.mesh import per_worker
from jaxcomp.quantize import blocks
from jaxcomp.reducers import choose

AXIS = "workers"
PARAMS = {
    "w": jnp.zeros((37, 53)),
    "v": jnp.zeros((11, 13, 5)),
    "h": jnp.zeros((33, 50), jnp.bfloat16),
    "b": jnp.zeros(23),
}
"""Buckets of 64 elements are 31 + 12 and 26, which neither 3, 4 nor 8 workers share evenly."""


def shapes(tx, sizes, params=PARAMS):
    """Shapes and dtypes of a state of so many workers, made inside the mapped function.

    Memory has one axis of workers, whether they are on one axis or two; the rest has none.
    """
    names = (AXIS,) if len(sizes) == 1 else ("slow", "fast")
    init = tx.init
    for name, size in reversed(list(zip(names, sizes, strict=True))):
        init = jax.vmap(init, in_axes=None, axis_name=name, axis_size=size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = jax.eval_shape(init, params)

    def outside(path, x):
        own = x.shape[len(sizes) :]
        shape = (int(np.prod(sizes)), *own[1:]) if per_worker.marked(path) else own
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree_util.tree_map_with_path(outside, state)


def all_rows(tx, params=PARAMS):
    """Shapes and dtypes of a state whose single worker has all rows, those of a downlink too."""
    last = choose.candidates
    choose._chosen.cache_clear()
    with (
        axes.assume_workers(1),
        warnings.catch_warnings(),
        mock.patch.object(choose, "candidates", lambda source: last(source)[-1:]),
    ):
        warnings.simplefilter("ignore")
        found = jax.eval_shape(lambda params: tx.init(params), params)
    choose._chosen.cache_clear()
    return found


UNPACK = jax.jit(jax.vmap(blocks.unpack))


def is_node(kind):
    return lambda node: isinstance(node, kind)


def nodes(tree, kind):
    return [x for x in jax.tree.leaves(tree, is_leaf=is_node(kind)) if isinstance(x, kind)]


def filled(state, one, seed=0):
    """Random memory in these shapes, with zeros in rows of shares that are but padding.

    Mirrors are what they should be: the mean of shifts, all shares of them, or those of neighbours.
    """
    rng = np.random.default_rng(seed)

    def draw(x):
        if isinstance(x, blocks.Blocks8):
            codes = jnp.asarray(rng.integers(-90, 91, x.codes.shape), jnp.int8)
            return blocks.Blocks8(codes, jnp.full(x.steps.shape, 2.0**-6, jnp.float32))
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.asarray(rng.standard_normal(x.shape), x.dtype)
        return jnp.asarray(rng.integers(1, 5, x.shape), x.dtype)

    def memory(node, like=None):
        if not per_worker.is_per_worker(node):
            return draw(node)
        tree = jax.tree.map(draw, node.tree, is_leaf=is_node(blocks.Blocks8))
        if node.kind == "slice":
            assert like is not None
            tree = jax.tree.map(real, tree, like.tree, is_leaf=is_node(blocks.Blocks8))
        return per_worker.PerWorker(tree, node.kind)

    def real(x, like):
        held, like = (x, like) if hasattr(x, "ndim") else (x.codes, like.codes)
        flat = held.reshape(-1, *held.shape[2:])
        known = jnp.arange(len(flat))[:, None] < like.shape[1]
        held = jnp.where(known, flat, 0).reshape(held.shape)
        return held if hasattr(x, "ndim") else x._replace(codes=held)

    def mirrored(node):
        if not isinstance(node, Mirrored):
            return node
        own, mirror = node.own, node.mirror
        if own.kind == "slice":  # Of a downlink, all of whose shares everyone knows.
            return Mirrored(own, jax.tree.map(lambda h: h.reshape(-1, h.shape[-1]), own.tree))
        if per_worker.is_per_worker(mirror) and mirror.kind == own.kind:  # Over a graph.
            heard = jax.tree.map(lambda h: jnp.roll(h, 1, 0), own.tree)
            return Mirrored(own, per_worker.PerWorker(heard, mirror.kind))
        if per_worker.is_per_worker(mirror):
            share = jax.tree.map(shared_mean, own.tree, mirror.tree)
            return Mirrored(own, per_worker.PerWorker(share, "slice"))
        return Mirrored(own, jax.tree.map(lambda h: h.mean(0, dtype=h.dtype), own.tree))

    def shared_mean(own, mirror):
        mean = own.mean(0, dtype=own.dtype)
        missing = mirror.shape[0] * mirror.shape[1] - mean.shape[0]
        return jnp.pad(mean, ((0, missing), (0, 0))).reshape(mirror.shape)

    # Without a downlink there is no padding.
    likes = (one,) if jax.tree.structure(state) == jax.tree.structure(one) else ()
    state = jax.tree.map(memory, state, *likes, is_leaf=per_worker.is_per_worker)
    return jax.tree.map(mirrored, state, is_leaf=is_node(Mirrored))


def plain(x):
    """`[n, …]` as float64."""
    x = UNPACK(x) if isinstance(x, blocks.Blocks8) else x
    return np.asarray(jnp.asarray(x, jnp.float32), np.float64)


def arrays(tree):
    return [plain(x) for x in jax.tree.leaves(tree, is_leaf=is_node(blocks.Blocks8))]


def rows(shares, count):
    """The real rows of `[n, each, size]`, none for none."""
    flat = shares.reshape(-1, shares.shape[-1])
    assert not flat[count:].any()  # Nothing waits where no one will look for it.
    return flat[:count]


def unsent(node, one):
    """Of each batch, the mean residual of the workers and the residual of the downlink."""
    memory = getattr(node.feedback, "tree", None)
    up = ()
    if isinstance(memory, ResidualState):
        up = memory.residual
    elif isinstance(memory, MomentumState):
        up = memory.velocity
    found = [x.mean(0) for x in arrays(up)]
    shots = nodes(node.reducer, LegState)
    for state, like in zip(shots, nodes(one.reducer, LegState), strict=False):
        held = getattr(state.memory, "tree", None)
        if not isinstance(held, ResidualState):
            continue
        for number, (x, whole) in enumerate(zip(arrays(held), counts(like.memory), strict=True)):
            down = rows(x, whole)
            if len(found) <= number:
                found.append(down)
            elif len(down):
                below = found[number]
                found[number] = below + down.reshape(len(below), -1)[:, : below.shape[1]]
    return found


def floating(tree):
    """Arrays that are averaged; of counters, each worker takes those of one old worker."""
    leaves = jax.tree.leaves(tree, is_leaf=is_node(blocks.Blocks8))
    exact = [isinstance(x, blocks.Blocks8) or jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]
    return [x for x, keep in zip(leaves, exact, strict=True) if keep]


def without_unsent(memory):
    """The other memory of a feedback."""
    return () if isinstance(memory, ResidualState) else getattr(memory, "momentum", memory)


def counts(node):
    """The rows of each array of one worker's share, which is all rows."""
    leaves = jax.tree.leaves(node.tree, is_leaf=is_node(blocks.Blocks8))
    return [jax.tree.leaves(x)[0].shape[1] for x in leaves]


def check_moved(before, after, one, tolerance=1e-5):
    """Raises if the content of a state is missing in another one."""

    def close(got, want):
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)

    if jax.tree.structure(before) != jax.tree.structure(after):
        check_unsent(before, after, one, close)
        return
    triples = zip(*(nodes(s, ReductionState) for s in (before, after, one)), strict=True)
    for old, new, like in triples:
        for got, want in zip(unsent(new, like), unsent(old, like), strict=True):
            close(got, want)
    uplinks = {id(node.feedback) for node in nodes(after, ReductionState)}
    kinds = zip(*(nodes(s, per_worker.PerWorker) for s in (before, after, one)), strict=True)
    for old, new, like in kinds:
        if old.kind == "codec":
            check_handed_on(old, new)
        elif old.kind == "codec slice":
            check_handed_on(old, new, like)
        elif old.kind != "slice":
            trees = [without_unsent(x.tree) if id(new) in uplinks else x.tree for x in (new, old)]
            for got, want in zip(*map(arrays, map(floating, trees)), strict=True):
                close(got.mean(0), want.mean(0))
    shifts = zip(*(nodes(s, Mirrored) for s in (before, after, one)), strict=True)
    for old, new, like in shifts:
        whole = counts(like.own)
        for got, want, count in zip(shift(new, whole), shift(old, whole), whole, strict=True):
            assert len(got[0]) == count
            for x in got:
                close(x, want[0])
    for got, want in zip(*map(shared, (after, before)), strict=True):
        np.testing.assert_array_equal(got, want)
    for got, want in zip(*map(rows_of_workers, (after, before)), strict=True):
        np.testing.assert_array_equal(got, want[np.arange(len(got)) * len(want) // len(got)])


def check_unsent(before, after, one, close):
    """Of workers with and without a downlink: residuals, of both directions together, are kept."""
    triples = zip(*(nodes(s, ReductionState) for s in (before, after, one)), strict=True)
    for old, new, like in triples:
        sums = unsent(old, like), unsent(new, like)
        assert len(sums[0]) == len(sums[1]) > 0
        for want, got in zip(*sums, strict=True):
            close(got, want)


def shift(node, whole):
    """Of each batch, the mean of the shifts, or all shares, and the mirror."""
    own = arrays(node.own.tree)
    if node.own.kind == "slice":
        mirrors = [x[None] for x in arrays(node.mirror)]
        means = [rows(x, count) for x, count in zip(own, whole, strict=True)]
    else:
        split = per_worker.is_per_worker(node.mirror)
        mirrors = arrays(node.mirror.tree) if split else [x[None] for x in arrays(node.mirror)]
        if split and node.mirror.kind == node.own.kind:
            mirrors = [x.mean(0)[None] for x in mirrors]
        means = [x.mean(0) for x in own]
    seen = [rows(x, count) for x, count in zip(mirrors, whole, strict=True)]
    return list(zip(means, seen, strict=True))


def check_handed_on(old, new, like=None):
    """Worker `j` of `m` gets the codec state of old worker `j * n // m`; split rows keep theirs."""
    leaves = [list(map(np.asarray, jax.tree.leaves(x))) for x in (old.tree, new.tree)]
    workers = len(leaves[1][0]) if leaves[1] else 0
    if like is not None and any(x.shape[1:] != y.shape[1:] for x, y in zip(*leaves, strict=True)):
        for x, y, count in zip(*leaves, counts(like), strict=True):
            np.testing.assert_array_equal(x.reshape(-1)[:count], y.reshape(-1)[:count])
        return
    for x, y in zip(*leaves, strict=True):
        np.testing.assert_array_equal(y, x[np.arange(workers) * len(x) // workers])


def shared(state):
    """What is replicated, but for mirrors and rows of workers."""
    return [
        np.asarray(x)
        for path, x in jax.tree_util.tree_leaves_with_path(state)
        if not per_worker.marked(path)
        and not {"mirror", "everyones"} & {getattr(key, "name", None) for key in path}
    ]


def rows_of_workers(state):
    """What every worker knows of each, `[workers, …]`."""
    return [
        np.asarray(x)
        for path, x in jax.tree_util.tree_leaves_with_path(state)
        if "everyones" in {getattr(key, "name", None) for key in path}
    ]
