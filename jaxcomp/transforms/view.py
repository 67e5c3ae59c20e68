"""Methods that evaluate the loss at other parameters than the trained ones.

`params` is always the centre: the same on all workers; evaluate and save it. A method whose workers
take gradients elsewhere stores the difference in a field `offset` of its state, and the loss is
taken at `view(params, state)`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp import checks
from jaxcomp.backend import axes, xla
from jaxcomp.base import Codec, Reducer, adapter
from jaxcomp.exchange import guarding
from jaxcomp.feedback import Link, Residual, Shift
from jaxcomp.layout import masked, policy as policy_, trees
from jaxcomp.layout.policy import Policy
from jaxcomp.mesh import kinds, per_worker
from jaxcomp.misuse import places
from jaxcomp.numerics import addition, noise
from jaxcomp.reducers import choose
from jaxcomp.transforms.mean import compressed_mean
from jaxcomp.types import Array, AxisName, PyTree

_DOWN = 0x646F776E
"""Folded into a step's key, so that the way down has noise of its own."""


def view(params: PyTree, state: PyTree) -> PyTree:
    """The parameters at which this worker evaluates its loss.

    They are `params` plus every offset in the state; without an offset, `params`. With MCM they are
    the compressed model that the workers received, with DGD-DEF the point that exact descent would
    have reached, and with `local_updates` the worker's own model. Use it inside the mapped
    function: `jax.grad(loss)(jaxcomp.local(jaxcomp.view(params, state), "data"), batch)`.

    Args:
        params: the centre.
        state: the state of the optax transformation.

    Raises:
        ValueError: outside of the mapped function, if the offsets belong to several workers.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.algorithms.mcm(jaxcomp.qsgd(bits=2), "data", learning_rate=0.1)
        >>> params = {"x": jnp.ones((64, 64))}
        >>> view(params, tx.init(params))["x"].shape  # Nothing has been sent down yet.
        (64, 64)
    """
    return in_boxes(_view, params, state)


def _view(params: PyTree, state: PyTree) -> PyTree:
    nodes = jax.tree.leaves(state, is_leaf=lambda n: kinds.DISPLACED.has(n) or is_split(n))
    for node in nodes:
        if is_split(node):
            params = in_parts(_view, params, node)
        if not kinds.DISPLACED.has(node):
            continue
        offset = node.offset.own() if per_worker.is_per_worker(node.offset) else node.offset
        part = masked.visible_part(params, offset)
        if hasattr(node, "here"):
            own = node.here(part)
        else:
            own = jax.tree.map(
                lambda p, by: (jnp.asarray(p, by.dtype) + by).astype(jnp.result_type(p)),
                part,
                offset,
            )
        params = complete(own, params)
    return params


def in_boxes(function: Callable[[PyTree, PyTree], PyTree], params: PyTree, state: Any) -> PyTree:
    """`function` of plain arrays, in the boxes of the parameters, such as variables of nnx.

    Raises:
        ValueError: for an object that changes in place, whose arrays it has inside.
    """
    kind = adapter.objects_of(params)
    if kind is not None:
        raise ValueError(
            f"`params` must be a tree of arrays, got an {kind.name} object: take its parameters, "
            "as in graph, params, rest = nnx.split(model, nnx.Param, ...), and merge what you get, "
            "nnx.merge(graph, jaxcomp.view(params, optimizer.opt_state), rest, copy=True)"
        )
    treedef = jax.tree.structure(params)
    for one in adapter.present():
        params, state = one.plain((params, state))
    return jax.tree.unflatten(treedef, jax.tree.leaves(function(params, state)))


def is_split(node: Any) -> bool:
    """Whether a node is the state of a chain that sees complex leaves as pairs of real ones."""
    return isinstance(node, optax.contrib.SplitRealAndImaginaryState)


def in_parts(function: Callable[[PyTree, PyTree], PyTree], params: PyTree, state: Any) -> PyTree:
    """`function` of complex parameters whose parts are leaves in `split_real_and_imaginary`."""

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        del params
        return function(updates, state), state

    inner = optax.GradientTransformation(lambda params: params, update)
    return optax.contrib.split_real_and_imaginary(inner).update(params, state, params)[0]


def complete(part: PyTree, params: PyTree) -> PyTree:
    """A tree of some leaves, with the others from `params`."""
    return jax.tree.map(
        lambda x, p: p if masked.absent(x) else x, part, params, is_leaf=masked.absent
    )


@kinds.DISPLACED.register
class PreservedState(NamedTuple):
    """State of `preserved_center`.

    Attributes:
        key: the raw key of the downlink's noise.
        step: the number of steps.
        known: `H`, the workers' estimate of the centre, at least in float32; one for each worker if
            `own`.
        offset: the workers' model minus the centre, at least in float32.
    """

    key: Array
    step: Array
    known: PyTree
    offset: PyTree


def preserved_center(
    codec: "Codec | Policy",
    axis_name: AxisName,
    *,
    step: float,
    own: bool = False,
    key: Any = 0,
) -> optax.GradientTransformationExtraArgs:
    """Compresses the model on the downlink, and keeps the exact model on the server.

    With `w` the parameters and `w + u` the next ones: `Ω = C(w + u − H)`, the workers evaluate the
    loss at `H + Ω` (`view`), and `H ← H + step · Ω`. Chain it last, after the optimizer.

    Args:
        codec: the downlink codec.
        axis_name: the mapped axis.
        step: the step size of `H`: at most `1/(1 + ω)` for an unbiased codec of variance `ω`, one
            for a contractive codec.
        own: True for a separate message to every worker, with separate noise.
        key: a seed or key, the same on all workers.

    Raises:
        ValueError: for a step that does not fit the codec, or an argument that is not a codec; on
            use, without `params`.

    Note:
        Here every device holds the centre, so the downlink is computed, not sent:
        `jaxcomp.wire_bytes(codec, params)` is the bytes that a server would send to each worker. A
        step whose updates are not finite leaves `H` unchanged.
    """
    if not isinstance(codec, Codec | Policy) or isinstance(codec, type):
        raise ValueError(
            "`codec` must be a codec such as jaxcomp.qsgd(bits=4), or a Policy of them, got "
            f"{codec!r}"
        )
    for member in policy_.of(codec).codecs:
        Shift(step).check(member, member.bucket_size)
    seed = noise.words(key)

    def kept(tree: PyTree) -> PyTree:
        return per_worker.PerWorker.wrap(tree, "offset", axis_name) if own else tree

    def init_fn(params: PyTree) -> Any:
        wide = jax.tree.map(lambda p: jnp.array(p, addition.wide(jnp.result_type(p))), params)
        return PreservedState(
            key=jnp.array(seed),
            step=jnp.zeros((), jnp.uint32),
            known=kept(wide),
            offset=kept(jax.tree.map(addition.zeros, params)),
        )

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        del extra
        if params is None:
            raise ValueError(
                "`params` must be given to the update, which sends the model down, got None: use "
                "tx.update(grads, state, params)"
            )
        axes.require(axis_name)
        places.check_view(updates, params, state.offset)
        held = per_worker.unwrap(state)
        center = jax.tree.map(lambda w, u: w + u.astype(jnp.result_type(w)), params, updates)
        message = jax.tree.map(lambda x, h: addition.saturate(x - h, x.dtype), center, held.known)
        turn = noise.fold(state.key, state.step, _DOWN)
        worker = jax.lax.axis_index(axis_name) if own else 0
        sent = trees.roundtrip(codec, turn, message, worker=worker)
        offset = jax.tree.map(lambda h, c, x: (h + c) - x, held.known, sent, center)
        known = jax.tree.map(lambda h, c: _moved(h, c, step), held.known, sent)
        finite = guarding.all_finite(updates)
        # A value out of range must not stay in `H`. With `own`, each worker decides for itself.
        sound = finite & guarding.all_finite((known, offset))

        return updates, PreservedState(
            key=state.key,
            step=jnp.where(finite, state.step + 1, state.step),
            known=guarding.where_finite(sound, kept(known), state.known),
            offset=guarding.where_finite(sound, kept(offset), state.offset),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _moved(held: Array, sent: Array, step: float) -> Array:
    """`held + step · sent`, rounded in the same way in every program: no fused multiply-add."""
    if step == 1:
        return held + sent
    wide = addition.wide(held.dtype)
    change = xla.block_fma(sent.astype(wide) * jnp.asarray(step, wide))
    return (held.astype(wide) + change).astype(held.dtype)


@kinds.DISPLACED.register
class DisplacedState(NamedTuple):
    """State of `displaced_mean`.

    Attributes:
        mean: the state of the compressed mean.
        offset: each worker's shift of the point at which it takes gradients.
    """

    mean: Any
    offset: per_worker.PerWorker


def displaced_mean(
    codec: "Codec | Policy | Link | Reducer",
    axis_name: AxisName,
    *,
    learning_rate: float,
    key: Any = 0,
) -> optax.GradientTransformationExtraArgs:
    """A compressed mean with residuals, whose workers take gradients at shifted parameters.

    With `r` a worker's residual, its loss is taken at `x − learning_rate · r` (`view`): for one
    worker, this is the point that exact descent would have reached.

    Args:
        codec: a contractive codec, a `Policy`, or a reducer of links with `Residual()`.
        axis_name: the mapped axis.
        learning_rate: the learning rate of the plain descent that follows.
        key: a seed or key, the same on all workers.

    Raises:
        ValueError: if the links have no residual.
    """
    checks.number("learning_rate", learning_rate, 0.0)
    given = Link(codec, Residual()) if isinstance(codec, Codec | Policy) else codec
    source = choose.link_or_reducer(given)
    uplink = choose.uplink(source)
    if uplink is None or not uplink.feedback.facts.keeps_unsent:
        raise ValueError(
            "`codec` must have links with a residual, such as "
            f"jaxcomp.Link(codec, jaxcomp.Residual()), got {codec!r}"
        )
    inner: Any = compressed_mean(source, axis_name, key=key)

    def wrapped(tree: PyTree) -> per_worker.PerWorker:
        return per_worker.PerWorker.wrap(tree, "offset", axis_name)

    def init_fn(params: PyTree) -> Any:
        return DisplacedState(inner.init(params), wrapped(jax.tree.map(addition.zeros, params)))

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        places.check_view(updates, params, state.offset)
        mean, after = inner.update(updates, state.mean, params, **extra)
        plan = choose.plan(source, updates, axis_name).layout
        unsent = uplink.feedback.unsent(per_worker.unwrap(after.memory.feedback))
        dense = tuple(jnp.zeros(plan.likes[i].shape, plan.likes[i].dtype) for i in plan.dense)

        def moved(r: Array) -> Array:
            by = xla.block_fma(r * jnp.asarray(-learning_rate, r.dtype))
            largest = jnp.finfo(r.dtype).max
            return jnp.where(jnp.isinf(by), jnp.sign(by) * largest, by)  # As residuals do.

        before = state.offset.own()
        unsent = jax.tree.map(
            lambda r, by: r.astype(by.dtype), trees.assemble(plan, unsent, dense), before
        )
        return mean, DisplacedState(after, wrapped(jax.tree.map(moved, unsent)))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
