"""A budget of bytes per step, spent on the leaves by the measured error of each codec."""

import collections
import dataclasses
import functools
import glob
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxcomp import checks
from jaxcomp.base import Codec
from jaxcomp.layout import policy as policy_, trees
from jaxcomp.layout.policy import Policy, Rule
from jaxcomp.planning.spending import LeafSpending, Spending, Uniform
from jaxcomp.recipes.rotations import eden
from jaxcomp.reducers import choose
from jaxcomp.theory import knapsack
from jaxcomp.types import PyTree

_DENSE = "dense"
_TRIES = 12
"""The most corrections of the budget: the sum of the leaves' bytes is not that of the tree."""
_CHANGES = 64
"""The most single leaves whose change is tried with the bytes of the whole tree."""


@functools.cache
def widths() -> Mapping[str, Codec]:
    """The codecs that a budget is spent on by default, of one bit per element to eight."""
    return {f"eden {bits}-bit": eden(bits=bits, rotations=2) for bits in range(1, 9)}


def spend(
    bytes_per_step: int,
    *gradients: PyTree,
    workers: int | None = None,
    codecs: Mapping[str, Codec] | None = None,
    weights: PyTree | None = None,
    min_size: int = 1024,
    min_ndim: int = 2,
    key: Any = 0,
) -> Spending:
    """Spends a budget of bytes on the leaves: chooses a codec for each, for a small total error.

    `minimise Σᵢ mean ‖x̂ᵢ − xᵢ‖²` over the leaves' codecs, subject to `Σᵢ bytesᵢ ≤ budget`. Each
    codec encodes the given gradients once, and its error is measured leaf by leaf, so that a leaf
    of larger variance gets more bits (reverse water-filling, with the widths and the errors that
    codecs really have). Bytes are those of `wire_bytes`. The choices of all leaves are found
    together, by dynamic programming.

    Args:
        bytes_per_step: the budget: payload bytes of one worker or, with `workers`, link bytes of
            one device.
        *gradients: the gradients of one worker in one step or several, as trees of floating arrays.
        workers: the number of workers, for link bytes of the reducer that `compressed_mean` picks;
            None for payload bytes.
        codecs: the codecs to choose from, by name; by default `eden(bits, rotations=2)` of one bit
            to eight. A leaf may also be sent dense.
        weights: an array or number for each leaf, or for each subtree, times which an element's
            error counts, such as `1 / (√ν + ε)` of Adam; None for all ones.
        min_size: leaves of fewer elements are sent dense, as by `Policy`.
        min_ndim: leaves of fewer dimensions are sent dense, as by `Policy`.
        key: the key of the noise of codecs: a seed, a raw `uint32[2]` key or a `jax.random.key`.

    Returns:
        A `Spending`: its `policy` is for `compressed_mean`.

    Raises:
        ValueError: if the budget is smaller than the least bytes of these codecs, gradients differ
            in their shapes or are not finite, or an argument is of the wrong kind.

    Example:
        >>> import jax.numpy as jnp, jaxcomp
        >>> loud, quiet = jax.random.normal(jax.random.key(0), (2, 64, 64))
        >>> codecs = {f"{bits}-bit": jaxcomp.qsgd_inf(bits=bits) for bits in (2, 4, 6)}
        >>> found = spend(4200, {"loud": loud, "quiet": 0.01 * quiet}, codecs=codecs)
        >>> [leaf.name for leaf in found.leaves]
        ['6-bit', '2-bit']
        >>> found.bytes == jaxcomp.wire_bytes(found.policy, {"loud": loud, "quiet": quiet})
        True

    Note:
        No leaf gets zero bits, unlike in reverse water-filling: a codec without feedback would
        never train it. The error is that of one message; a reducer that rounds the mean again adds
        its own. With a residual, the message is not the gradient, and its error differs.
    """
    codecs = widths() if codecs is None else codecs
    layout = _layout(bytes_per_step, gradients, workers, codecs)
    checks.integer("min_size", min_size, 0)
    checks.integer("min_ndim", min_ndim, 0)
    ladder: dict[str, Codec | None] = {**codecs, _DENSE: None}
    small = Policy(next(iter(codecs.values())), min_size=min_size, min_ndim=min_ndim)
    leaves = enumerate(zip(layout.paths, layout.likes, strict=True))
    chosen = [i for i, (path, x) in leaves if x.size and small.choose(path, x.shape, x.dtype)[0]]
    scales = None if weights is None else _weights(weights, layout)
    samples = [layout.treedef.flatten_up_to(tree) for tree in gradients]
    energies = np.mean([[_energy(x) for x in sample] for sample in samples], axis=0)
    errors = [
        np.zeros((len(chosen), 2))
        if codec is None
        else _errors(codec, chosen, layout.paths, samples, scales, key)
        for codec in ladder.values()
    ]
    offers = _Offers(tuple(ladder.items()), chosen, layout, small, workers)
    counted = [[error[row, 0] for error in errors] for row in range(len(chosen))]
    found = _allocate(offers, counted, bytes_per_step)
    plain = [error[:, 1] for error in errors]
    return _spending(offers, found, plain, energies, bytes_per_step)


class _Offers(NamedTuple):
    """The leaves that have a choice of codec, and the bytes of each choice.

    Attributes:
        ladder: the codecs by name, and None for dense.
        chosen: the numbers of the leaves that have a choice.
        layout: the paths, shapes and dtypes of all leaves.
        small: the policy that says which leaves have a choice.
        workers: as given to `spend`.
    """

    ladder: tuple[tuple[str, Codec | None], ...]
    chosen: list[int]
    layout: trees.Layout
    small: Policy
    workers: int | None

    def policy(self, choice: Sequence[int]) -> Policy:
        """The most frequent codec as the default, and a rule for each other leaf."""
        common = collections.Counter(choice).most_common(1)
        default = common[0][0] if common else len(self.ladder) - 1
        rules = [
            Rule(glob.escape(self.layout.paths[leaf]), self.ladder[rung][1])
            for leaf, rung in zip(self.chosen, choice, strict=True)
            if rung != default
        ]
        return dataclasses.replace(self.small, codec=self.ladder[default][1], rules=tuple(rules))

    def bytes(self, choice: Sequence[int]) -> int:
        """The bytes of the tree."""
        tree = jax.tree.unflatten(self.layout.treedef, self.layout.likes)
        return self.cost(self.policy(choice), tree)

    def cost(self, policy: Policy, like: PyTree) -> int:
        """The bytes of a tree like this."""
        if self.workers is None:
            return choose.wire_bytes(policy, like)
        return choose.wire_bytes(choose.link_or_reducer(policy), like, self.workers)


def _layout(
    bytes_per_step: Any, gradients: Sequence[PyTree], workers: Any, codecs: Any
) -> trees.Layout:
    """Shapes, paths and structure of the gradients; raises a `ValueError` for wrong arguments."""
    checks.integer("bytes_per_step", bytes_per_step, 1)
    if workers is not None:
        checks.integer("workers", workers, 2)
    known = isinstance(codecs, Mapping) and codecs and _DENSE not in codecs
    if not known or not all(isinstance(codec, Codec) for codec in codecs.values()):
        raise ValueError(
            "`codecs` must be codecs by name, such as {'4-bit': jaxcomp.qsgd_inf(bits=4)}, got "
            f"{codecs!r}"
        )
    if not gradients:
        raise ValueError("`gradients` must be at least one tree of arrays, got none")
    layout, *others = (trees.layout(policy_.NOTHING, tree) for tree in gradients)
    for other in others:
        if (other.likes, other.paths) != (layout.likes, layout.paths):
            raise ValueError(
                "`gradients` must have the same leaves in every step, got "
                f"{layout.likes} and {other.likes}"
            )
    for tree in gradients:
        for path, leaf in zip(layout.paths, jax.tree.leaves(tree), strict=True):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise ValueError(
                    "`gradients` must hold values, since errors are measured, got the shape of "
                    f"{path!r}"
                )
            if not math.isfinite(_energy(leaf)):
                raise ValueError(f"`gradients` must be finite, got {path!r} with NaN or Inf")
    return layout


def _weights(weights: PyTree, layout: trees.Layout) -> list[np.ndarray]:
    """The weights of each leaf, in float64."""
    tree = jax.tree.unflatten(layout.treedef, layout.likes)
    try:
        found = jax.tree.leaves(
            jax.tree.map(lambda w, part: jax.tree.map(lambda _: w, part), weights, tree)
        )
        wide = [np.asarray(weight, np.float64) for weight in found]
        for weight, like in zip(wide, layout.likes, strict=True):
            np.broadcast_to(weight, like.shape)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"`weights` must be arrays or numbers like the gradients, or a prefix of them: {error}"
        ) from None
    for path, weight in zip(layout.paths, wide, strict=True):
        if not np.all(np.isfinite(weight) & (weight >= 0)):
            raise ValueError(f"`weights` must be finite and not negative, got others at {path!r}")
    return wide


def _energy(leaf: Any) -> float:
    wide = np.asarray(leaf, np.float64)
    return float(np.sum(wide * wide))


def _errors(
    codec: Codec,
    chosen: Sequence[int],
    paths: Sequence[str],
    samples: Sequence[Sequence[Any]],
    scales: Sequence[np.ndarray] | None,
    key: Any,
) -> np.ndarray:
    """The squared errors of each leaf that has a choice, `[leaves, 2]`: weighted, and plain."""
    total = np.zeros((len(chosen), 2))
    for sample in samples:
        given = {str(i): sample[i] for i in chosen}
        decoded = trees.roundtrip(codec, key, given)
        for row, i in enumerate(chosen):
            off = np.asarray(decoded[str(i)], np.float64) - np.asarray(sample[i], np.float64)
            if not np.all(np.isfinite(off)):
                raise ValueError(
                    f"`codecs` must decode {paths[i]!r} to finite values, and {codec!r} does not"
                )
            weighed = off if scales is None else off * scales[i]
            total[row] += np.sum(weighed * weighed), np.sum(off * off)
    return total / len(samples)


def _allocate(offers: _Offers, errors: list[list[float]], budget: int) -> list[int]:
    """The number of each leaf's choice, so that the bytes of the tree are within the budget."""
    likes = [offers.layout.likes[leaf] for leaf in offers.chosen]
    kinds = [(like.shape, like.dtype) for like in likes]
    alone = [_alone(codec) for _, codec in offers.ladder]
    known = {
        kind: [offers.cost(policy, like) for policy in alone]
        for kind, like in dict(zip(kinds, likes, strict=True)).items()
    }
    prices = [known[kind] for kind in kinds]
    cheapest = [min(range(len(row)), key=row.__getitem__) for row in prices]
    least = offers.bytes(cheapest)
    if least > budget:
        raise ValueError(
            f"`bytes_per_step` must be at least {least:,} for these codecs and leaves, got "
            f"{budget:,}; give a codec of fewer bits, such as jaxcomp.eden(bits=0.5, rotations=2)"
        )
    best, best_error = cheapest, knapsack.total(errors, cheapest)
    for rung in range(len(offers.ladder)):
        choice = [rung] * len(errors)
        if knapsack.total(errors, choice) < best_error and offers.bytes(choice) <= budget:
            best, best_error = choice, knapsack.total(errors, choice)
    # The tree has fewer or more bytes than its leaves one by one, by the padding of their batches.
    room = budget - least + sum(row[c] for row, c in zip(prices, cheapest, strict=True))
    before = None
    for _ in range(_TRIES):
        choice = knapsack.fill(prices, errors, room)
        if choice == before:
            break
        left = budget - offers.bytes(choice)
        if left >= 0 and knapsack.total(errors, choice) < best_error:
            best, best_error = choice, knapsack.total(errors, choice)
        before, room = choice, knapsack.total(prices, choice) + left
    return _polished(offers, prices, errors, best, budget)


def _polished(
    offers: _Offers,
    prices: list[list[int]],
    errors: list[list[float]],
    choice: list[int],
    budget: int,
) -> list[int]:
    """Changes of single leaves that fit by the bytes of the whole tree, the best ones first."""
    tries = _CHANGES
    while tries > 0:
        for leaf, after in knapsack.changes(prices, errors, choice)[:tries]:
            tries -= 1
            other = [after if row == leaf else c for row, c in enumerate(choice)]
            if offers.bytes(other) <= budget:
                choice = other
                break
        else:
            break
    return choice


def _spending(
    offers: _Offers, choice: list[int], errors: list[np.ndarray], energies: np.ndarray, budget: int
) -> Spending:
    """The result, leaf by leaf, and the best single codec for all leaves."""
    total = math.fsum(energies) or 1.0
    rows = {leaf: row for row, leaf in enumerate(offers.chosen)}
    lines = []
    for leaf, (path, like) in enumerate(zip(offers.layout.paths, offers.layout.likes, strict=True)):
        row, size, energy = rows.get(leaf), max(like.size, 1), float(energies[leaf])
        name, codec = (_DENSE, None) if row is None else offers.ladder[choice[row]]
        lost = 0.0 if row is None else float(errors[choice[row]][row])
        bits = 8 * choose.wire_bytes(_alone(codec), like) / size
        lines.append(
            LeafSpending(path, like.shape, name, codec, bits, energy / size, lost / (energy or 1.0))
        )
    alike = [
        Uniform(name, offers.bytes([rung] * len(choice)), math.fsum(errors[rung]) / total)
        for rung, (name, codec) in enumerate(offers.ladder)
        if codec is not None and choice
    ]
    fitting = [one for one in alike if one.bytes <= budget]
    return Spending(
        policy=offers.policy(choice),
        leaves=tuple(lines),
        budget=budget,
        bytes=offers.bytes(choice),
        error=math.fsum(errors[c][row] for row, c in enumerate(choice)) / total,
        uniform=min(fitting, key=lambda one: one.error, default=None),
        workers=offers.workers,
    )


def _alone(codec: Codec | None) -> Policy:
    """The policy of a leaf by itself."""
    return policy_.NOTHING if codec is None else policy_.everywhere(codec)
