"""A leaf of which each device has a part, and how it is made whole where it is used."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxcomp.backend import axes
from jaxcomp.base import Codec
from jaxcomp.collectives import arguments
from jaxcomp.collectives.shards import AllGather
from jaxcomp.collectives.sums import Pvary
from jaxcomp.collectives.transfer import Transfer, transfer
from jaxcomp.layout import policy as policy_
from jaxcomp.layout.policy import Policy
from jaxcomp.misuse import sharded_loss
from jaxcomp.numerics import noise
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


def by_axis(
    name: str, given: Any, names: tuple[str, ...], default: Mapping[str, Policy]
) -> tuple[tuple[str, Policy], ...]:
    """The policy of each axis.

    Args:
        name: the name of the argument, for errors.
        given: a codec, a policy, None, or a mapping from each axis to one of these.
        names: the axes.
        default: the policies where `given` is None; empty for dense.

    Raises:
        ValueError: for another mapping, or another kind of codec.
    """
    if given is None and default:
        return tuple(default.items())
    if isinstance(given, Mapping):
        if set(given) != set(names):
            raise ValueError(
                f"`{name}` must name each axis of the workers, {names}, got {tuple(given)}"
            )
        each = [given[axis] for axis in names]
    else:
        each = [given] * len(names)
    given = [
        arguments.policy(name, policy_.of(one) if isinstance(one, Codec) else one) for one in each
    ]
    # Leaves are judged as one layer already where they are stacked.
    plain = [dataclasses.replace(one, stacked=None) for one in given]
    return tuple(zip(names, plain, strict=True))


@dataclasses.dataclass(frozen=True)
class Home:
    """Where a leaf lies.

    Attributes:
        path: the path of the leaf.
        spec: for each of its dimensions the axes that split it.
        frozen: whether it has no gradient.
    """

    path: str
    spec: tuple[tuple[str, ...], ...]
    frozen: bool = False

    @classmethod
    def of(
        cls, path: str, spec: PartitionSpec, ndim: int, names: tuple[str, ...], *, frozen: bool
    ) -> "Home":
        """The home of a leaf; axes that are not among the links' do not count."""
        entries = [tuple(n for n in axes.names(entry) if n in names) for entry in spec]
        return cls(path, (*entries, *[()] * (ndim - len(entries))), frozen)

    @property
    def axes(self) -> frozenset[str]:
        """The axes that split it."""
        return frozenset(name for names in self.spec for name in names)

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
        return dataclasses.replace(self, spec=self.spec[1:])


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
        ValueError: for leaves that are still stacked: call it inside the loop over layers; for
            parts that were cast.

    Example:
        >>> import jax, jax.numpy as jnp, jaxcomp
        >>> def loss(params, x):
        ...     @jax.checkpoint
        ...     def layer(x, own):
        ...         return jnp.tanh(x @ gathered(own)["w"]), None
        ...     return (jax.lax.scan(layer, x, params["blocks"])[0] ** 2).mean()

    Note:
        Make a layer whole once in a step: a second call sends it again, with the same noise. A loss
        that computes with parts, such as a norm over all parameters, is refused: add up what whole
        layers contribute, or take optax.add_decayed_weights for a penalty of the weights.

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
            if one.key.dtype != jnp.uint32:
                raise ValueError(
                    f"`tree` must hold parts as the loss got them, got '{path}' cast to "
                    f"{one.key.dtype}: cast the result of jaxcomp.gathered, or give "
                    "jaxcomp.fully_sharded a `dtype`"
                )
            if one.array.ndim != len(one.home.spec):
                raise ValueError(
                    f"`tree` must be one layer, got all layers of '{path}': call "
                    "jaxcomp.gathered inside the loop over layers, such as jax.lax.scan"
                )
        # Of the paths, so that calls that share a leaf do not draw the same noise for others.
        key = arguments.key_of_site(own[min(own)].key, " ".join(sorted(own)))
        whole = together(
            {path: one.array for path, one in own.items()},
            {path: one.home for path, one in own.items()},
            links,
            key,
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
    parts, key = sharded_loss.mark((dict(parts), key))
    sizes = {axis: axes.size(axis) for axis in links.axes}
    wholes = {path: homes[path].whole(x.shape, sizes) for path, x in parts.items()}
    crossed, narrow = list(crossings(homes, wholes, links)), links.dtype
    first = crossed[0][1]
    found = {
        path: x.astype(narrow)
        if narrow and may_be_coded(x) and first.choose(path, wholes[path])[0] is None
        else x
        for path, x in parts.items()
    }
    for axis, weights, gradients, at in crossed:
        faster = links.axes[links.axes.index(axis) + 1 :]
        slower = links.axes[: links.axes.index(axis)]
        groups: dict[tuple[bool, bool, tuple[str, ...]], dict[str, Array]] = {}
        for path, x in found.items():
            apart = tuple(name for name in faster if _place(homes[path], name) is not None)
            groups.setdefault((path in at, homes[path].frozen, apart), {})[path] = x
        for (split, frozen, apart), own in groups.items():
            if frozen:
                site = (axis, "frozen", *apart)
                there = _on_axes(arguments.key_of_site(key, site), apart)
                found |= _frozen_leaves(axis, weights, there, own, at) if split else {}
                continue
            # Noise differs between all devices whose messages differ, and is the same where they
            # are the same: forward on all hosts that have the part already, and back on all that
            # have added up the gradient already.
            there = _on_axes(arguments.key_of_site(key, (axis, *apart)), apart)
            back = _on_axes(arguments.key_of_site(there, "back"), slower)
            if split:
                places = arguments.places(own, {path: at[path] for path in own})
                how: Transfer = AllGather(axis, weights, gradients, False, places, False)
                own = axes.vary(own, axis)
            else:
                how = Pvary(axis, gradients, gradients, True)
            found |= transfer(how, there, own, back)
    whole = {path: jnp.reshape(x, wholes[path]) for path, x in found.items()}
    return {p: x.astype(narrow) if narrow and may_be_coded(x) else x for p, x in whole.items()}


def _frozen_leaves(
    axis: str, weights: Policy, key: Array, own: Mapping[str, Array], at: Mapping[str, int]
) -> dict[str, Array]:
    """Every worker's part of leaves without a gradient, stacked; none of it travels back."""
    own = lax.stop_gradient(axes.vary(dict(own), axis))
    coded = {path: x for path, x in own.items() if may_be_coded(x)}
    places = arguments.places(coded, {path: at[path] for path in coded})
    how = AllGather(axis, weights, weights, False, places, False)
    found = how.run(key, coded) if coded else {}
    for path in sorted(own.keys() - coded.keys()):
        x = axes.vary(lax.all_gather(_bits(own[path]), axis, axis=at[path]), axis)
        same = x.dtype == own[path].dtype
        found[path] = x if same else lax.bitcast_convert_type(x, own[path].dtype)
    return found


def _bits(x: Array) -> Array:
    """A leaf that the compiler does not widen before it is sent, as it does floats of 8 bits."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}"))


def may_be_coded(x: Any) -> bool:
    """Whether a leaf has a dtype that codecs take; all others are sent as they are."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize >= 2


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
        yield axis, of_weights(weights, homes, wholes), gradients.for_leaves(wholes), at


def of_weights(
    policy: Policy, homes: Mapping[str, Home], wholes: Mapping[str, tuple[int, ...]]
) -> Policy:
    """The policy of these leaves; frozen ones are exact, unless a rule names them."""
    exact = dataclasses.replace(policy, codec=None, rest=None)
    rules = (
        rule
        for one, frozen in ((policy, False), (exact, True))
        for rule in one.for_leaves(
            {path: shape for path, shape in wholes.items() if homes[path].frozen == frozen}
        ).rules
    )
    return Policy(None, tuple(rules))


def _is_shard(node: Any) -> bool:
    return isinstance(node, Shard)


def _on_axes(key: Array, names: tuple[str, ...]) -> Array:
    """The key with this device's numbers along other axes folded in."""
    return noise.fold(key, *(lax.axis_index(name) for name in names))


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
