"""`fully_sharded`: the loss and gradients of a model of which each device stores a part."""

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcomp.backend import adapting, axes, mapping
from jaxcomp.base import Codec
from jaxcomp.collectives import arguments, pipelining, traffic
from jaxcomp.collectives.beside import Beside, same_by_type
from jaxcomp.collectives.costs import LinkBytes
from jaxcomp.collectives.crossings import Home, Links, by_axis
from jaxcomp.collectives.parts import Parts
from jaxcomp.collectives.shard import Shard, together
from jaxcomp.layout import trees
from jaxcomp.layout.policy import Policy
from jaxcomp.mesh import axis_types, specs as specs_
from jaxcomp.misuse import sharded_loss, uniform
from jaxcomp.numerics import noise
from jaxcomp.types import Array, AxisName, PyTree

Codecs = Codec | Policy | None
"""A codec with the default policy, a policy, or None to send dense."""


def fully_sharded(
    loss_fn: Callable[..., Any],
    mesh: Mesh,
    axis_name: AxisName,
    specs: PyTree,
    *,
    weights: "Codecs | Mapping[str, Codecs]",
    gradients: "Codecs | Mapping[str, Codecs]" = None,
    dtype: Any = None,
    stacked: tuple[str, ...] = (),
    inside: tuple[str, ...] = (),
    frozen: PyTree = (),
    has_aux: bool = False,
    check_vma: bool = True,
    adapt: bool = False,
) -> "FullySharded":
    """The loss and its gradients for parameters that are sharded over the workers (ZeRO-3).

    Weights are gathered compressed where they are used, gradients are added up and scattered
    compressed:

        w = concat_i D(C_weights(w_i)),   g_i = 1/n · Σ_j D(C_gradients(∂loss_j/∂w))[i]

    Nobody stores a replica, so differences cannot be sent: weights go directly, and what a biased
    codec leaves out of a gradient is lost. So take 8 bits or more for weights, and an unbiased
    codec for gradients. The optimizer steps the shards, in their own dtype.

    Args:
        loss_fn: `loss_fn(params, *batch)`, the mean over this worker's batch; with `has_aux` a pair
            of it and a tree. Workers have equal numbers of examples. Where they count
            unequal numbers of them, such as tokens that are no padding, the mean over all is
            `total * lax.axis_size(axis) / lax.psum(count, axis)`.
        mesh: the mesh of the devices, whose other axes stay automatic.
        axis_name: the axis of the workers, or a tuple of them, the slowest first. The batch is
            split over all of them. Parameters are split over those that their spec names, and
            replicated over the others.
        specs: a tree of `PartitionSpec` like the parameters, or a prefix of one.
        weights: the codec of the weights, a `Policy`, or None to send dense; or a mapping from each
            axis to one of these, for fewer bits over slower links. A policy decides by the shape of
            the whole leaf, of a stacked one by that of a layer; a bare codec leaves one-dimensional
            leaves and those of fewer than 1,024 elements dense.
        gradients: the same for gradients; None for the codecs of the weights, `Identity()` to send
            dense.
        dtype: the dtype in which the loss gets the weights, such as `jnp.bfloat16`; the shards, the
            sums of compressed gradients and the results keep that of the parameters.
        stacked: globs of leaves whose first axis indexes layers. The loss gets parts of them, and
            makes one layer whole at a time: `jaxcomp.gathered(layer)` inside its `jax.lax.scan`.
        inside: globs of other leaves of which the loss gets parts, to make them whole by
            `jaxcomp.gathered` in the function of a layer. All other leaves are whole from the
            beginning.
        frozen: the leaves that are not trained: globs such as `("base/*",)`, or what
            `jaxcomp.freeze` takes, a tree like the parameters or a prefix of one with True for
            them, or a function that returns it. They may have any dtype, are sharded and gathered
            as all others, but exact, if no rule of a policy of `weights` names them, and integers
            stay integers. Their gradient is None, and nothing is sent for it: step with
            `jaxcomp.freeze(tx, frozen)`, which takes a mask.
        has_aux: whether the loss returns a tree beside it, as for `jax.value_and_grad` of the whole
            batch. Floating numbers that differ between workers are averaged as the loss is; rows of
            examples, which are as many as the worker's batch has, stay split over the workers; what
            is the same on all workers is returned as it is. Anything else is refused, as are sums
            that would be averaged: return the `jax.lax.psum` of a count.
        check_vma: whether JAX tracks which values differ between workers; False for a loss with
            functions that cannot tell.
        adapt: whether constraints and nested `jax.shard_map`s in the loss, which name these axes or
            hold the mesh, are adapted while it is traced, as by `jaxcomp.data_parallel`.

    Returns:
        `f(params, *batch, key=step)`, which returns `(loss, gradients)`, or `((loss, aux),
        gradients)`: the mean over all workers, and gradients sharded like the parameters. Leaves of
        the batch are split along their first axis, scalars are the same on all workers. It may be
        called inside `jax.jit`. Its `link_bytes(params)` are the bytes of a step.

    Raises:
        ValueError: on construction, for wrong axes or codecs; on use, for parameters that are not
            floating, specs that do not fit, a key that is missing, a batch that the workers do
            not divide, a loss that computes with parts of leaves, or one that is divided by a sum
            over all workers, or by a count of the worker's own batch, which may differ from others.

    Warns:
        UserWarning: for a biased codec of gradients, and for specs that split leaves over automatic
            axes, too.

    Example:
        >>> import jax, jax.numpy as jnp, jaxcomp
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> loss = lambda params, x: ((x @ params["w"]) ** 2).mean()
        >>> loss_and_grad = fully_sharded(
        ...     loss, mesh, "fsdp", {"w": P("fsdp")},
        ...     weights=jaxcomp.qsgd_inf(bits=8), gradients=jaxcomp.qsgd_inf(bits=4),
        ... )
        >>> value, grads = loss_and_grad({"w": jnp.ones((64, 64))}, jnp.ones((8, 64)), key=0)
        >>> grads["w"].shape
        (64, 64)

    References:
        Rajbhandari et al., `ZeRO <https://arxiv.org/abs/1910.02054>`_, 2020, stage 3; Markov et
        al., `Quantized Distributed Training of Large Models with Convergence Guarantees
        <https://arxiv.org/abs/2302.02390>`_, 2023; Wang et al., `ZeRO++
        <https://arxiv.org/abs/2306.10209>`_, 2023.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(f"`mesh` must be a jax.sharding.Mesh, got {mesh!r}")
    names = axes.names(axis_name)
    missing = [name for name in names if name not in mesh.axis_names]
    if missing or not names or len(set(names)) < len(names):
        raise ValueError(
            f"`axis_name` must be axes of the mesh, {mesh.axis_names}, each once, got {axis_name!r}"
        )
    rest = [name for name in axis_types.explicit(mesh) if name not in names]
    if rest:
        raise ValueError(
            f"`mesh` must have automatic axes beside {axis_name!r}, got the explicit axis "
            f"{rest[0]!r}: make it with axis_types=(AxisType.Auto, ...)"
        )
    if dtype is not None and not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise ValueError(f"`dtype` must be a floating dtype, or None, got {dtype!r}")
    of_weights = by_axis("weights", weights, names, {})
    of_gradients = by_axis("gradients", gradients, names, dict(of_weights))
    lossy = [c for _, one in of_gradients for c in one.codecs if c.contractive]
    if lossy:
        warnings.warn(
            f"`gradients`: {lossy[0]!r} is biased, and there is no memory for what it drops, which "
            "is lost for good; take an unbiased codec such as jaxcomp.qsgd_inf(bits=4).",
            stacklevel=2,
        )
    parts = Parts(mesh, names, specs, stacked, inside, frozen)
    links = Links(of_weights, of_gradients, None if dtype is None else jnp.dtype(dtype))
    return FullySharded(loss_fn, parts, links, has_aux, check_vma, adapt)


@dataclasses.dataclass(frozen=True, eq=False)
class FullySharded:
    """The loss and gradients of a sharded model, as a function of its parts.

    Attributes:
        loss_fn: the loss.
        parts: the mesh, and where each leaf lies on it.
        links: the codecs.
        has_aux: whether the loss returns a tree beside it.
        check_vma: whether types track what differs.
        adapt: whether code for the whole mesh is adapted.
    """

    loss_fn: Callable[..., Any]
    parts: Parts
    links: Links
    has_aux: bool
    check_vma: bool
    adapt: bool

    def __call__(self, params: PyTree, *batch: Any, key: Any = None) -> tuple[Any, PyTree]:
        """The loss and the gradients.

        Args:
            params: the parameters.
            batch: the arguments of the loss after the parameters.
            key: the number of the step, a `jax.random.key` or a raw key. Micro-batches of a step
                need different ones, too, such as `4 * number + micro`: with the same key their
                rounding errors are alike and do not average out.
        """
        if key is None:
            raise ValueError(
                "`key` must be the number of the step, a jax.random.key or a raw key, another one "
                "in each step, got None"
            )
        return self._run(params, batch, arguments.raw(key))

    def link_bytes(self, params: PyTree) -> dict[str, LinkBytes]:
        """The bytes that one device sends in a step, by the axis that they cross.

        Args:
            params: the parameters, or their shapes and dtypes.

        Returns:
            For each axis those of the weights, `forward`, and those of the gradients, `backward`.
            A layer that is made whole again in the backward pass, inside `jax.checkpoint`, sends
            its weights twice; with `jaxcomp.second_copy` over the fastest axis alone.
        """
        flat, homes = jax.tree.leaves(params), self.parts.homes(params)
        sent = dict.fromkeys(self.links.axes, LinkBytes(0, 0))
        for _, numbers in self.parts.groups(homes):
            stacked = self.parts.in_layers(homes[numbers[0]].path)
            layers = len(flat[numbers[0]]) if stacked else 1
            layer = [
                (
                    homes[number].layer() if stacked else homes[number],
                    jax.ShapeDtypeStruct(jnp.shape(flat[number])[stacked:], flat[number].dtype),
                )
                for number in numbers
            ]
            for axis, moved in traffic.moved_bytes(layer, self.links, dict(self.parts.mesh.shape)):
                pairs = zip(moved, sent[axis], strict=True)
                sent[axis] = LinkBytes(*(layers * more + one for more, one in pairs))
        return sent

    @functools.cached_property
    def _run(self) -> Callable[..., tuple[Any, PyTree]]:
        return jax.jit(self._mapped)

    def _mapped(self, params: PyTree, batch: tuple, key: Array) -> tuple[Any, PyTree]:
        homes, mesh, names = self.parts.homes(params), self.parts.mesh, self.parts.names
        only = functools.partial(specs_.of_axes, names)
        beside, automatic = Beside(names), self.parts.automatic(params)
        if automatic and any(one.codecs for _, one in self.links.weights + self.links.gradients):
            warnings.warn(
                f"`specs`: {min(automatic)!r} is split over automatic axes beside {names}, over "
                "which the compiler gathers leaves before they are encoded: every device sends all "
                "of them, and `link_bytes` does not count that gather. Split leaves over "
                f"{names} only, or name all axes in `axis_name`.",
                stacklevel=2,
            )
        own = jax.tree.map(only, self.parts.each_spec(params), is_leaf=specs_.is_partition)
        flat = jax.tree.leaves(own, is_leaf=specs_.is_partition)
        of_trained = [spec for spec, home in zip(flat, homes, strict=True) if not home.frozen]
        workers = math.prod(mesh.shape[name] for name in names)
        lengths = {len(leaf) for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)}
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            raw_key = jnp.result_type(leaf) == jnp.uint32 and jnp.shape(leaf) in ((2,), (4,))
            alone = lengths == {len(leaf)} if raw_key else True
            if jnp.ndim(leaf) and (jnp.shape(leaf)[0] % workers or not alone):
                raise ValueError(
                    f"`batch` must have numbers of examples that {workers} workers divide, got "
                    f"'{trees.path_name(path)}' of shape {jnp.shape(leaf)}; a random key must be a "
                    "typed one, jax.random.key(...)"
                )
        split = jax.tree.map(
            lambda x: PartitionSpec(names) if jnp.ndim(x) else PartitionSpec(), batch
        )
        specs = (own, split, PartitionSpec())
        if explicit := axis_types.explicit(mesh):
            params, batch, key = jax.tree.map(
                lambda x, spec: jax.sharding.reshard(
                    x, NamedSharding(mesh, specs_.of_axes(explicit, spec))
                ),
                (params, batch, key),
                (self.parts.each_spec(params), split, PartitionSpec()),
            )
        of_worker = functools.partial(self._of_worker, homes, workers, beside)
        whole = mapping.shard_map(
            pipelining.pipelined(of_worker) if self.parts.stacked else of_worker,
            mesh=mesh,
            in_specs=specs,
            out_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec(names), of_trained),
            axis_names=set(names),
            check_vma=self.check_vma,
        )
        (loss, *means), same, rows, trained = whole(params, batch, key)
        each = iter(trained)
        grads = [None if home.frozen else next(each) for home in homes]
        for number, home in enumerate(homes):
            if home.path in automatic and not home.frozen:
                grads[number] = lax.with_sharding_constraint(grads[number], automatic[home.path])
        grads = jax.tree.unflatten(jax.tree.structure(params), grads)
        return (loss, beside.join(means, same, rows)) if self.has_aux else loss, grads

    def _of_worker(
        self,
        homes: Sequence[Home],
        workers: int,
        beside: Beside,
        params: PyTree,
        batch: tuple,
        key: Array,
    ) -> tuple[list[Array], list[Array], list[Array], PyTree]:
        """The means, the loss first, the other values beside it, and gradients of the parts."""

        def objective(trained: list[Array]) -> tuple[Array, Any]:
            each = iter(trained)
            own = [x if home.frozen else next(each) for x, home in zip(parts, homes, strict=True)]
            whole = jax.tree.unflatten(treedef, self._given(own, homes, key))
            found = self.loss_fn(whole, *batch)
            if isinstance(found, tuple) != self.has_aux or (self.has_aux and len(found) != 2):
                wanted = "a pair of the mean and a tree" if self.has_aux else "the mean alone"
                raise ValueError(
                    f"`loss_fn` must return {wanted} with has_aux={self.has_aux}, got {found!r}"
                )
            loss, aux = found if self.has_aux else (found, ())
            if jnp.shape(loss) != ():
                raise ValueError(
                    f"`loss_fn` must return the mean over its batch, one number, got shape "
                    f"{jnp.shape(loss)}"
                )
            if axes.typed(names) and not set(names) <= axes.varying_axes(loss):
                raise ValueError(
                    f"`loss_fn` must return the mean over this worker's own batch, got one that is "
                    f"averaged over {names} already, whose gradients would be divided by the "
                    "number of workers twice: leave jax.lax.pmean out. A mean over unequal counts "
                    "is total * jax.lax.axis_size(axis) / jax.lax.psum(count, axis)"
                )
            return loss / workers, (loss, beside.take(aux))

        names = self.parts.names
        batch = jax.tree.map(functools.partial(_of_own, names), batch)
        parts, treedef = jax.tree.flatten(params)
        trained = [x for x, home in zip(parts, homes, strict=True) if not home.frozen]
        with adapting.adapted(names) if self.adapt else contextlib.nullcontext():
            grads, (loss, aux) = jax.grad(objective, has_aux=True)(trained)
        examples = [x for x in jax.tree.leaves(batch) if jnp.ndim(x)]
        known = [(x, frozenset(names)) for x in examples]
        known += [(x, home.axes) for x, home in zip(parts, homes, strict=True)]
        differ = uniform.differ(aux, known, names)
        means, same, rows = beside.apart(aux, differ, {len(x) for x in examples})
        sharded_loss.check(loss, means, aux, [*parts, key], examples, names)
        means = lax.pmean(axes.vary([loss, *means], names), names)
        return means, same_by_type(same, names), rows, grads

    def _given(self, flat: Sequence[Array], homes: Sequence[Home], key: Array) -> list[Any]:
        """The leaves as the loss gets them, from this device's parts."""
        found: list[Any] = list(flat)
        for name, numbers in self.parts.groups(homes):
            path = homes[numbers[0]].path
            if self.parts.is_given_as_part(path):
                stacked = self.parts.in_layers(path)
                for number in numbers:
                    x, home = flat[number], homes[number]
                    own = arguments.key_of_site(key, home.path)
                    if stacked:
                        own = jax.vmap(noise.fold, (None, 0))(own, jnp.arange(len(x)))
                        home = home.layer()
                    found[number] = Shard(x, own, home, self.links)
            else:
                whole = together(
                    {homes[number].path: flat[number] for number in numbers},
                    {homes[number].path: homes[number] for number in numbers},
                    self.links,
                    arguments.key_of_site(key, name),
                )
                for number in numbers:
                    found[number] = whole[homes[number].path]
        return found


def _of_own(names: tuple[str, ...], leaf: Any) -> Any:
    """A typed key as one of this worker; all else as it is."""
    if not jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
        return leaf
    return jax.random.fold_in(leaf, lax.axis_index(names))
