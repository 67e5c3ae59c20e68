"""Latent parameters of networks whose weights are binary or ternary."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp import checks
from jaxcomp.codecs.votes import Votes
from jaxcomp.federated.work import Loss
from jaxcomp.layout import trees
from jaxcomp.layout.policy import Policy, Rule
from jaxcomp.types import Array, PyTree

_CERTAIN = 1 - 1e-4
"""The largest mean of votes: of 1 the latent parameter would be infinite."""


@dataclasses.dataclass(frozen=True)
class Latent:
    """A loss of latent parameters `θ`, whose forward weights are `tanh(k·θ)`.

    It is called as a loss, `latent(params, batch)`. A forward weight in (−1, 1) is the mean of a
    random binary or ternary weight, and the deployed network has the most likely one.

    Args:
        loss: `loss(weights, batch)`, a scalar, of a network with weights in [−1, 1]: it needs its
            own normalization, since nothing else limits its activations.
        k: the steepness of the map from `θ` to weights.
        where: a glob or several over the paths of the latent leaves; only leaves of at least two
            dimensions are latent. All others are ordinary parameters, trained as floats.

    Raises:
        ValueError: for a loss that is not callable, a `k` that is not positive, or a `where` that
            is no glob; on use, if no leaf is latent.

    Example:
        >>> loss = Latent(lambda w, x: jnp.mean((x @ w - 1) ** 2))
        >>> loss.weights(jnp.array([[0.0, 9.0]]))
        Array([[0., 1.]], dtype=float32)
        >>> loss.deploy(jnp.array([[0.1, -0.2]]))
        Array([[ 1., -1.]], dtype=float32)

    References:
        Yue, Jin, Wong and Dai, `Federated learning via plurality vote
        <https://arxiv.org/abs/2110.02998>`_ (FedVote), 2021.

    Note:
        In the authors' code the last layer is float and frozen; let `loss` close over what is never
        trained, since the parameters that are given are sent. A ternary weight is the nearest of
        −1, 0 and 1 to `tanh(k·θ)`: which one the authors deploy is not known.
    """

    loss: Loss
    k: float = 1.5
    where: str | tuple[str, ...] = "*"

    def __post_init__(self):
        if not callable(self.loss):
            raise ValueError(
                f"`loss` must be a function loss(weights, batch) -> scalar, got {self.loss!r}"
            )
        checks.positive("k", self.k)
        globs = (self.where,) if isinstance(self.where, str) else self.where
        if not (isinstance(globs, tuple) and globs and all(isinstance(g, str) for g in globs)):
            raise ValueError(
                "`where` must be a glob such as '*/kernel', or a tuple of globs, got "
                f"{self.where!r}"
            )

    def __call__(self, params: PyTree, batch: Any) -> Array:
        """The loss of the forward weights."""
        return self.loss(self.weights(params), batch)

    def policy(self, votes: Votes) -> Policy:
        """Votes for the latent leaves; the others are sent dense."""
        globs = (self.where,) if isinstance(self.where, str) else self.where
        return Policy(None, tuple(Rule(glob, votes, min_ndim=2) for glob in globs))

    def weights(self, params: PyTree) -> PyTree:
        """The forward weights: `tanh(k·θ)` for the latent leaves, the others as they are."""
        return self._map(lambda x: jnp.tanh(self.k * x), lambda x: x, params)

    def signal(self, start: PyTree, end: PyTree) -> PyTree:
        """A client's message: its forward weights; of other leaves, the difference `φ − θ`."""
        return self._map(lambda _, x: jnp.tanh(self.k * x), jnp.subtract, start, end)

    def deploy(self, params: PyTree, values: int = 2) -> PyTree:
        """The weights of the deployed network.

        Args:
            params: latent parameters.
            values: 2 for the signs `±1`, of which zero gets `+1`; 3 for −1, 0 and 1.

        Raises:
            ValueError: for another number of values.
        """
        checks.choice("values", values, (2, 3))

        def deployed(x: Array) -> Array:
            if values == 2:
                return jnp.where(x < 0, -1, 1).astype(x.dtype)
            return jnp.round(jnp.tanh(self.k * x))

        return self._map(deployed, lambda x: x, params)

    def inverse(self) -> optax.GradientTransformation:
        """The server's step from the mean of votes `w̄`: `θ ← artanh(w̄) / k`.

        The mean is clipped to ±(1 − 10⁻⁴). Leaves that are not latent move by their mean
        difference.
        """

        def init(params: PyTree) -> optax.EmptyState:
            del params
            return optax.EmptyState()

        def back(mean: Array, x: Array) -> Array:
            return jnp.arctanh(jnp.clip(mean, -_CERTAIN, _CERTAIN)) / self.k - x

        def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
            return self._map(back, lambda mean, _: -mean, updates, params), state

        return optax.GradientTransformation(init, update)

    def _map(self, latent: Any, other: Any, first: PyTree, *rest: PyTree) -> PyTree:
        """Maps latent leaves by one function, and the others by another."""
        policy, found = self.policy(Votes()), []

        def one(path: Any, leaf: Array, *others: Array) -> Array:
            chosen = policy.choose(trees.path_name(path), jnp.shape(leaf))[0]
            found.append(chosen is not None)
            return (other if chosen is None else latent)(leaf, *others)

        mapped = jax.tree_util.tree_map_with_path(one, first, *rest)
        if not any(found):
            raise ValueError(
                f"`where` must match a leaf of at least two dimensions, got {self.where!r} for "
                f"leaves of shapes {jax.tree.map(jnp.shape, first)}"
            )
        return mapped
