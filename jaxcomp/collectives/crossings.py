"""Where the leaves of a sharded model lie, and the messages that cross each axis.

The messages of leaves are planned once, by where the leaves lie, their shapes and the codecs.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from jaxcomp.backend import axes
from jaxcomp.base import Codec
from jaxcomp.collectives import arguments
from jaxcomp.layout import policy as policy_
from jaxcomp.layout.policy import Policy


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


class Group(NamedTuple):
    """Leaves that cross an axis as one message.

    Attributes:
        paths: the leaves.
        split: whether the axis splits them, so that their weights cross it.
        frozen: whether they have no gradient.
        apart: the faster axes that split them, whose devices send other messages.
    """

    paths: tuple[str, ...]
    split: bool
    frozen: bool
    apart: tuple[str, ...]


class Crossing(NamedTuple):
    """An axis that leaves cross.

    Attributes:
        axis: the name of the axis.
        weights: the codecs of the weights.
        gradients: the codecs of the gradients.
        at: where each leaf that the axis splits is stacked along it.
        groups: the messages.
    """

    axis: str
    weights: Policy
    gradients: Policy
    at: Mapping[str, int]
    groups: tuple[Group, ...]


def crossings(
    homes: Mapping[str, Home], wholes: Mapping[str, tuple[int, ...]], links: Links
) -> tuple[Crossing, ...]:
    """The plan of leaves: each axis, its codecs, and the messages that cross it.

    Args:
        homes: where each leaf lies, by its path.
        wholes: the shape of each whole leaf, by which its codecs are chosen.
        links: the codecs.
    """
    return _crossings(tuple((homes[path], shape) for path, shape in wholes.items()), links)


@functools.lru_cache(maxsize=1024)
def _crossings(
    leaves: tuple[tuple[Home, tuple[int, ...]], ...], links: Links
) -> tuple[Crossing, ...]:
    homes = {home.path: home for home, _ in leaves}
    wholes = {home.path: shape for home, shape in leaves}
    # The axes by which each dimension is already whole, in front of the part's own.
    done: dict[str, list[list[str]]] = {path: [[] for _ in homes[path].spec] for path in wholes}
    found = []
    for (axis, weights), (_, gradients) in zip(links.weights, links.gradients, strict=True):
        at = {
            path: _stack(homes[path], axis, done[path])
            for path in wholes
            if _place(homes[path], axis) is not None
        }
        faster, groups = links.axes[links.axes.index(axis) + 1 :], {}
        for path, home in homes.items():
            apart = tuple(name for name in faster if _place(home, name) is not None)
            groups.setdefault((path in at, home.frozen, apart), []).append(path)
        messages = tuple(Group(tuple(paths), *how) for how, paths in groups.items())
        of_axis = of_weights(weights, homes, wholes), gradients.for_leaves(wholes)
        found.append(Crossing(axis, *of_axis, at, messages))
    return tuple(found)


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
