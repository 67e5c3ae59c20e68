"""Integers among the parameters of an app of one's own, such as the counters of batch norm.

In the method's tree they are float32, which holds them exactly, and nothing compresses them. Only
the app, and who reads the strategy's parameters, has them as integers.
"""

import dataclasses
import glob
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp.adapters.flower import raw
from jaxcomp.codecs import Identity
from jaxcomp.federated.method import Method
from jaxcomp.federated.work import difference
from jaxcomp.feedback import Link
from jaxcomp.layout import trees
from jaxcomp.layout.policy import Policy, Rule
from jaxcomp.types import PyTree

_LARGEST = 2**24
"""Float32 holds all integers up to this one."""


def among(tree: PyTree) -> list[str]:
    """The paths of the leaves that are integers."""
    leaves = jax.tree_util.tree_leaves_with_path(raw.like(tree))
    return [trees.path_name(path) for path, leaf in leaves if _is_integer(leaf)]


def apart(method: Method, like: PyTree) -> Method:
    """The method, which sends integers as they are, and moves them to the clients' mean.

    Args:
        method: the method; returned as it is if there are no integers.
        like: the parameters, or their shapes and dtypes.

    Raises:
        ValueError: for a method whose clients send another signal than differences.
    """
    paths = among(like)
    if not paths:
        return method
    if method.signal is not difference:
        raise ValueError(
            "`signal` must be the default with integers among the parameters, got "
            f"{method.signal!r} and integers at {paths}; leave them out of the parameters"
        )
    labels = jax.tree.map(lambda x: "sent" if _is_integer(x) else "trained", like)
    server = optax.partition({"trained": method.server, "sent": optax.sgd(1.0)}, lambda _: labels)
    down = method.downlink
    return dataclasses.replace(
        method,
        up=dataclasses.replace(method.uplink, link=_exact(method.uplink.link, paths)),
        down=None if down is None else _exact(down, paths),
        server=server,
    )


def as_floats(tree: PyTree) -> PyTree:
    """The tree, or its shapes and dtypes, with float32 in place of integers.

    Raises:
        ValueError: for an integer that float32 cannot hold.
    """

    def change(path: tuple, leaf: Any) -> Any:
        if not _is_integer(leaf):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
        numbers = np.asarray(leaf)
        if np.any((numbers > _LARGEST) | (numbers < -_LARGEST)):
            raise ValueError(
                f"integers among the parameters must be at most {_LARGEST:,}, got "
                f"{trees.path_name(path)!r} from {numbers.min()} to {numbers.max()}"
            )
        return numbers.astype(np.float32)

    return jax.tree_util.tree_map_with_path(change, tree)


def restore_integers(tree: PyTree, like: PyTree) -> PyTree:
    """The tree with the nearest integers where `like` has integers."""

    def change(leaf: Any, one: Any) -> Any:
        return np.rint(np.asarray(leaf)).astype(one.dtype) if _is_integer(one) else leaf

    return jax.tree.map(change, tree, like)


def _exact(link: Any, paths: list[str]) -> Link:
    policy: Policy = link.policy
    # A rule without a codec would leave the leaf to `rest`.
    codec = None if policy.rest is None else Identity()
    rules = (*(Rule(glob.escape(path), codec) for path in paths), *policy.rules)
    return dataclasses.replace(link, codec=dataclasses.replace(policy, rules=rules))


def _is_integer(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", None) or np.asarray(leaf).dtype, jnp.integer)
