"""A small problem whose solution is known, on which methods can be held to their theory."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.protocols import Array


class Quadratics(NamedTuple):
    """Least squares that every worker has of its own, each with another optimum.

    Attributes:
        matrices: `[workers, rows, size]`.
        targets: `[workers, rows]`.
        ridge: the weight of `½‖x‖²` in every worker's loss.
        solution: of the mean of all losses, `[size]`.
        smoothness: `L` of the mean loss.
        condition: `κ` of the mean loss.
    """

    matrices: Array
    targets: Array
    ridge: float
    solution: Array
    smoothness: float
    condition: float

    @property
    def workers(self) -> int:
        return self.targets.shape[0]

    def error(self, x: Array) -> Array:
        """`‖x − x*‖² / ‖x*‖²`."""
        return jnp.sum((x - self.solution) ** 2) / jnp.sum(self.solution**2)


def quadratics(
    workers: int = 8, size: int = 50, rows: int = 100, ridge: float = 0.1, seed: int = 0
) -> Quadratics:
    """Heterogeneous least squares: `fᵢ(x) = ½‖Aᵢx − bᵢ‖² + λ/2 ‖x‖²`.

    `Aᵢ` is Gaussian times `(1 + 0.3 i)/√rows`, so workers differ in curvature, and `bᵢ = Aᵢ xᵢ` for
    a Gaussian `xᵢ` of its own, so gradients do not vanish at the solution.

    Args:
        workers: how many.
        size: dimensions.
        rows: of each worker's matrix.
        ridge: `λ`.
        seed: of the draws.

    Example:
        >>> round(quadratics().condition, 2)
        3.21
    """
    rng = np.random.default_rng(seed)
    scale = [(1 + 0.3 * i) / np.sqrt(rows) for i in range(workers)]
    matrices = np.stack([rng.standard_normal((rows, size)) * s for s in scale])
    targets = np.einsum("nmd,nd->nm", matrices, rng.standard_normal((workers, size)))
    curvature = np.einsum("nmd,nme->de", matrices, matrices) / workers + ridge * np.eye(size)
    solution = np.linalg.solve(curvature, np.einsum("nmd,nm->d", matrices, targets) / workers)
    values = np.linalg.eigvalsh(curvature)
    return Quadratics(
        matrices=jnp.asarray(matrices),
        targets=jnp.asarray(targets),
        ridge=ridge,
        solution=jnp.asarray(solution),
        smoothness=float(values[-1]),
        condition=float(values[-1] / values[0]),
    )


class Run(NamedTuple):
    """How a run went.

    Attributes:
        error: `‖x − x*‖² / ‖x*‖²` after each step.
        alike: whether all workers had the same update, bit for bit, at every step.
        params: the parameters in the end.
        state: of the transformation, with a leading axis of workers.
    """

    error: np.ndarray
    alike: bool
    params: Array
    state: Any


def descend(tx: Any, problem: Quadratics, steps: int, axis_name: str = "workers") -> Run:
    """Takes steps by a transformation that averages gradients, on workers simulated by `vmap`.

    Args:
        tx: for instance `optax.chain(jaxcomp.compressed_mean(...), optax.sgd(rate))`; the
            parameters are `{"x": [1, size]}`.
        problem: what to solve, from zero.
        steps: how many.
        axis_name: as given to `tx`.

    Example:
        >>> import jaxcomp, optax
        >>> problem = quadratics()
        >>> tx = optax.chain(
        ...     jaxcomp.compressed_mean(jaxcomp.Dense(), "workers"),
        ...     optax.sgd(1 / problem.smoothness),
        ... )
        >>> bool(descend(tx, problem, steps=40).error[-1] < 1e-6)
        True
    """
    start = {"x": jnp.zeros((1, problem.solution.size), problem.solution.dtype)}

    def one(params, matrix, target, state):
        residual = matrix @ params["x"][0] - target
        grads = {"x": (matrix.T @ residual + problem.ridge * params["x"][0])[None]}
        return tx.update(grads, state, params)

    everyone = jax.vmap(one, in_axes=(None, 0, 0, 0), axis_name=axis_name)

    def step(carry, _):
        params, state = carry
        updates, state = everyone(params, problem.matrices, problem.targets, state)
        changes = updates["x"]
        params = {"x": params["x"] + changes[0]}
        alike = jnp.all(changes == changes[:1])  # A difference might be fused with a product.
        return (params, state), (problem.error(params["x"][0]), alike)

    @jax.jit
    def run():
        workers = jnp.arange(problem.workers)
        state = jax.vmap(lambda _: tx.init(start), axis_name=axis_name)(workers)
        return jax.lax.scan(step, (start, state), None, length=steps)

    (params, state), (error, alike) = run()
    return Run(np.asarray(error), bool(alike.all()), params["x"][0], state)
