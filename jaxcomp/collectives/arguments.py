"""The checked arguments of every collective."""

import dataclasses
import warnings
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.backend import axes
from jaxcomp.base import Codec, Reducer
from jaxcomp.codecs.identity import Identity
from jaxcomp.feedback import Link
from jaxcomp.layout import policy as policy_, trees
from jaxcomp.layout.policy import NOTHING, Policy
from jaxcomp.mesh import axis_types
from jaxcomp.misuse import uniform
from jaxcomp.numerics import noise
from jaxcomp.types import Array, AxisName, PyTree

_LIKE = jax.ShapeDtypeStruct((2, 64), jnp.float32)


def policies(codec: Any, back: Any) -> tuple[Policy, Policy]:
    """The policies of both passes; `back=None` is the codec of the forward pass."""
    forward = policy("codec", codec)
    return forward, forward if back is None else policy("back", back)


def policy(name: str, codec: Any) -> Policy:
    """The policy of a codec without memory; `Identity` sends by JAX's own collectives.

    Raises:
        ValueError: for another kind of argument, or for a codec that needs memory, an agreement or
            the shape of a leaf.
    """
    if codec is None:
        return NOTHING
    if isinstance(codec, Link | Reducer):
        raise ValueError(
            f"`{name}` must be a codec or a Policy, since a collective has no memory, got "
            f"{codec!r}: its codec alone, or a transformation such as jaxcomp.compressed_mean or "
            "jaxcomp.sharded_optimizer, which keeps memory in its state"
        )
    if not isinstance(codec, Codec | Policy):
        raise ValueError(
            f"`{name}` must be a codec such as jaxcomp.qsgd_inf(bits=8), a Policy, or None to send "
            f"dense, got {codec!r}"
        )
    given = codec if isinstance(codec, Policy) else policy_.everywhere(codec)
    for one in given.codecs:
        _check(name, one)
    return _without_identity(given)


def warn_if_gathered(axis_name: AxisName, *policies: Policy) -> None:
    """Warns if the compiler would gather sharded arrays to encode them."""
    left = axis_types.beside(axis_name)
    if left and any(policy.codecs for policy in policies):
        warnings.warn(
            f"the mesh has automatic axes {left} beside {axis_name!r}: arrays that are sharded "
            "over them are gathered before they are encoded, and every device sends all of them. "
            "Name these axes, too, in `axis_names` of jax.shard_map, or in a second one inside it, "
            "so that each device sends its own shard.",
            stacklevel=3,
        )


def _check(name: str, codec: Codec) -> None:
    instead = "take one such as jaxcomp.qsgd_inf(bits=8) or jaxcomp.mx('mxfp8')"
    if codec.facts.agrees or codec.facts.sided:
        raise ValueError(
            f"`{name}` must not need the workers to agree on anything before they encode, got "
            f"{codec!r}: {instead}"
        )
    if codec.facts.shaped:
        raise ValueError(
            f"`{name}` must be a codec of buckets, got {codec!r}, which needs the shape of a whole "
            f"leaf: {instead}"
        )
    if jax.tree.leaves(jax.eval_shape(lambda: codec.init(_LIKE))):
        raise ValueError(
            f"`{name}` must need no memory from step to step, got {codec!r}, which has a state: "
            f"{instead}"
        )


def _without_identity(policy: Policy) -> Policy:
    """The same policy, in which `Identity` is None, and so dense."""

    def none(codec: Codec | None) -> Codec | None:
        return None if isinstance(codec, Identity) else codec

    rules = tuple(dataclasses.replace(rule, codec=none(rule.codec)) for rule in policy.rules)
    if policy.rest is not None and not isinstance(policy.rest, Identity):
        return policy  # Which would encode the leaves that are None here.
    return dataclasses.replace(policy, codec=none(policy.codec), rest=None, rules=rules)


def key_of(axis_name: AxisName, key: Any, site: Any) -> Array:
    """The raw key of one call.

    Args:
        axis_name: the axes of the workers, which must be bound here.
        key: the number of the step, a `jax.random.key` or a raw key.
        site: the number or name of the call, or a tuple of them.

    Raises:
        ValueError: without a key; for one that differs between workers, of which without types only
            one that is made from the worker's index, or mapped by `jax.vmap`, is known; for axes of
            devices and of `jax.vmap` together.
    """
    axes.require(axis_name)
    if lanes := axes.lanes(axis_name):
        raise ValueError(
            f"`axis_name` must be axes of devices or axes of jax.vmap, got {axis_name!r}, of which "
            f"{lanes} are those of jax.vmap: call it over these first, then over "
            f"{axes.without(axis_name, lanes)!r}, each with a site of its own"
        )
    if key is None:
        raise ValueError(
            "`key` must be the number of the step, a jax.random.key or a raw key, the same on all "
            "workers and another one in each step, got None"
        )
    found = key_of_site(raw(key), site)
    if set(axes.names(axis_name)) & axes.varying_axes(found) or any(
        uniform.differ([found], (), axis_name)
    ):
        raise ValueError(
            f"`key` and `site` must be the same on all workers of {axis_name!r}, such as the "
            "number of the step and that of the layer, got one that differs between them"
        )
    return found


def raw(key: Any) -> Array:
    """The raw key of a step: of a number as one word, so that it may be a traced one."""
    if jnp.ndim(key) == 0 and jnp.issubdtype(jnp.result_type(key), jnp.integer):
        return noise.fold(noise.raw(0), _number(key))
    return noise.raw(key)


def key_of_site(key: Array, site: Any) -> Array:
    """The key with the number or name of a call, or a tuple of them, folded in."""
    for part in site if isinstance(site, tuple) else (site,):
        nested = isinstance(part, tuple)
        key = key_of_site(key, part) if nested else noise.fold(key, _word(part))
    return key


def _word(site: Any) -> Any:
    if isinstance(site, str):
        return _number(zlib.crc32(site.encode()))
    if isinstance(site, bool) or not jnp.issubdtype(jnp.result_type(site), jnp.integer):
        raise ValueError(
            "`site` must be a number or a name, such as 'block/mlp', or a tuple of them, got "
            f"{site!r}"
        )
    return _number(site)


def _number(value: Any) -> Array:
    """An integer as 32 bits, of a Python integer the lowest."""
    if isinstance(value, int | np.integer):
        return jnp.asarray(np.uint32(int(value) % 2**32))
    return jnp.asarray(value).astype(jnp.uint32)


def check_tree(name: str, tree: PyTree) -> None:
    """Raises a `ValueError` unless every leaf is an array of floats."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
            raise ValueError(
                f"every leaf of `tree` must have a floating dtype, got "
                f"'{trees.path_name(path)}' of {dtype}: send "
                + ("(x.real, x.imag) in place of x" if is_complex else f"it by jax.lax.{name}")
            )


def dimension(path: Any, name: str, value: int, ndim: int) -> int:
    """A dimension of a leaf, counted from its first.

    Raises:
        ValueError: if the leaf has no such dimension.
    """
    if not -ndim <= value < ndim:
        raise ValueError(
            f"`{name}` must be a dimension of every leaf, got {value} for "
            f"'{trees.path_name(path)}' of {ndim} dimensions"
        )
    return value % ndim


def places(tree: PyTree, at: PyTree) -> int | tuple[int, ...]:
    """A dimension of all leaves, or those of a tree of dimensions in the order of the leaves."""
    if isinstance(at, int):
        return at
    return tuple(jax.tree.leaves(jax.tree.map(lambda _, one: int(one), tree, at)))
