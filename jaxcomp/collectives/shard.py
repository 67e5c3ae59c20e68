"""A leaf of which each device has a part, and how it is made whole where it is used."""

import dataclasses
import glob
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxcomp.backend import axes
from jaxcomp.collectives import shards, sums
from jaxcomp.layout.policy import Policy, Rule
from jaxcomp.types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class Links:
    """The codecs of a sharded model, by the axis that they cross.

    Attributes:
        weights: the codecs of the weights, the slowest axis first.
        gradients: the codecs of the gradients, of the same axes.
        dtype: the dtype in which the loss gets the weights; None for their own.
    """

    weights: tuple[tuple[str, Policy], ...]
    gradients: tuple[tuple[str, Policy], ...]
    dtype: Any

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.weights)


@dataclasses.dataclass(frozen=True)
class Home:
    """Where a leaf lies.

    Attributes:
        path: the path of the leaf.
        spec: for each of its dimensions the axes that split it.
    """

    path: str
    spec: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, path: str, spec: PartitionSpec, ndim: int, names: tuple[str, ...]) -> "Home":
        """The home of a leaf; axes that are not among the links' do not count."""
        entries = [tuple(n for n in axes.names(entry) if n in names) for entry in spec]
        return cls(path, (*entries, *[()] * (ndim - len(entries))))

    def whole(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the leaf, of which a part has this shape, for axes of these sizes."""
        return tuple(
            length * math.prod(sizes[name] for name in split)
            for length, split in zip(shape, self.spec, strict=True)
        )

    def part(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of a part of a leaf of this shape: the inverse of `whole`."""
        return tuple(
            length // math.prod(sizes[name] for name in split)
            for length, split in zip(shape, self.spec, strict=True)
        )

    def layer(self) -> "Home":
        """The home of one layer of a leaf whose first axis indexes layers."""
        return Home(self.path, self.spec[1:])


@jax.tree_util.register_pytree_with_keys_class
class Shard:
    """This device's part of a leaf; `jaxcomp.gathered` makes it whole.

    A loop such as `jax.lax.scan` slices it layer by layer, as it slices an array.

    Args:
        array: the part.
        key: the raw key of its messages, or one for each layer.
        home: where the leaf, or each layer of it, lies.
        links: the codecs.
    """

    def __init__(self, array: Any, key: Any, home: Home, links: Links):
        self.array = array
        self.key = key
        self.home = home
        self.links = links

    def tree_flatten_with_keys(self):
        children = (
            (jax.tree_util.GetAttrKey("array"), self.array),
            (jax.tree_util.GetAttrKey("key"), self.key),
        )
        return children, (self.home, self.links)

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(*children, *static)

    def __jax_array__(self) -> Array:
        raise ValueError(self._part())

    def __getattr__(self, name: str) -> Any:
        # Never of a half-made node, such as `copy.copy` makes.
        raise AttributeError(self._part() if "home" in vars(self) else name)

    def _part(self) -> str:
        return (
            f"`{self.home.path}` must be made whole where the loss uses it, got this device's part "
            "of it: use jaxcomp.gathered(layer), inside the function of one layer"
        )

    def _refuse(self, *_: Any) -> Any:
        raise ValueError(self._part())

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = _refuse
    __rmatmul__ = __truediv__ = __rtruediv__ = __pow__ = __neg__ = __getitem__ = _refuse

    def __repr__(self) -> str:
        return f"Shard({self.home.path!r}, {self.array!r})"


def gathered(tree: PyTree) -> PyTree:
    """The whole leaves of a layer, inside the loss of `jaxcomp.fully_sharded`.

    All parts in the tree travel as one message over each axis, the slowest first. In the backward
    pass their gradients are added up and scattered, the fastest axis first.

    Args:
        tree: a layer's parameters. What `fully_sharded` gave as a part is made whole, all other
            leaves are returned as they are.

    Raises:
        ValueError: for leaves that are still stacked: call it inside the loop over layers.

    Example:
        >>> import jax, jax.numpy as jnp, jaxcomp
        >>> def loss(params, x):
        ...     @jax.checkpoint
        ...     def layer(x, own):
        ...         return jnp.tanh(x @ gathered(own)["w"]), None
        ...     return (jax.lax.scan(layer, x, params["blocks"])[0] ** 2).mean()

    Note:
        Inside `jax.checkpoint`, as here, the backward pass gathers the layer again, and one layer
        is whole at a time.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_shard)
    groups: dict[Links, list[int]] = {}
    for number, leaf in enumerate(leaves):
        if _is_shard(leaf):
            groups.setdefault(leaf.links, []).append(number)
    for links, numbers in groups.items():
        own = {leaves[number].home.path: leaves[number] for number in numbers}
        if len(own) < len(numbers):
            raise ValueError(
                "`tree` must have each part once, got one layer or leaf several times in a call"
            )
        for path, one in own.items():
            if one.array.ndim != len(one.home.spec):
                raise ValueError(
                    f"`tree` must be one layer, got all layers of '{path}': call "
                    "jaxcomp.gathered inside the loop over layers, such as jax.lax.scan"
                )
        first = min(own)
        whole = together(
            {path: one.array for path, one in own.items()},
            {path: one.home for path, one in own.items()},
            links,
            own[first].key,
        )
        for number in numbers:
            leaves[number] = whole[leaves[number].home.path]
    return jax.tree.unflatten(treedef, leaves)


def together(
    parts: Mapping[str, Array], homes: Mapping[str, Home], links: Links, key: Array
) -> dict[str, Array]:
    """The whole leaves of these parts.

    Args:
        parts: this device's part of each leaf, by its path.
        homes: where each leaf lies.
        links: the codecs.
        key: the key of the messages.
    """
    sizes = {axis: axes.size(axis) for axis in links.axes}
    wholes = {path: homes[path].whole(x.shape, sizes) for path, x in parts.items()}
    first, narrow = links.weights[0][1], links.dtype
    found = {
        path: x.astype(narrow) if narrow and first.choose(path, wholes[path])[0] is None else x
        for path, x in parts.items()
    }
    for axis, weights, gradients, at in crossings(homes, wholes, links):
        here = {path: found[path] for path in at}
        rest = {path: x for path, x in found.items() if path not in at}
        if here:
            found |= shards.all_gather(
                here, axis, weights, key=key, site=axis, back=gradients, axis=at, tiled=False
            )
        if rest:
            found |= sums.pvary(rest, axis, gradients, key=key, site=("back", axis))
    return {
        path: jnp.reshape(x, wholes[path]).astype(narrow or x.dtype) for path, x in found.items()
    }


def crossings(
    homes: Mapping[str, Home], wholes: Mapping[str, tuple[int, ...]], links: Links
) -> Iterator[tuple[str, Policy, Policy, dict[str, int]]]:
    """Each axis, its codecs, and the leaves that are stacked along it, with where.

    Args:
        homes: where each leaf lies, by its path.
        wholes: the shape of each whole leaf, by which its codecs are chosen.
        links: the codecs.
    """
    # The axes by which each dimension is already whole, in front of the part's own.
    done: dict[str, list[list[str]]] = {path: [[] for _ in homes[path].spec] for path in wholes}
    for (axis, weights), (_, gradients) in zip(links.weights, links.gradients, strict=True):
        at = {
            path: _stack(homes[path], axis, done[path])
            for path in wholes
            if _place(homes[path], axis) is not None
        }
        yield axis, _decided(weights, wholes), _decided(gradients, wholes), at


def _is_shard(node: Any) -> bool:
    return isinstance(node, Shard)


def _place(home: Home, axis: str) -> int | None:
    """The dimension that an axis splits."""
    return next((at for at, names in enumerate(home.spec) if axis in names), None)


def _stack(home: Home, axis: str, done: list[list[str]]) -> int:
    """Where to stack the parts along an axis, which is noted in `done`."""
    at = _place(home, axis)
    assert at is not None
    before = [name for name in home.spec[at] if name in done[at]]
    order = [name for name in home.spec[at] if name in before or name == axis]
    done[at] = order
    return sum(len(names) for names in done[:at]) + at + order.index(axis)


def _decided(policy: Policy, wholes: Mapping[str, tuple[int, ...]]) -> Policy:
    """The policy with one rule for each leaf, decided by the shape of the whole leaf."""
    rules = (Rule(glob.escape(path), policy.choose(path, own)[0]) for path, own in wholes.items())
    return Policy(None, tuple(rules))
