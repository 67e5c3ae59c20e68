"""Small problems with known solutions, for tests of methods against their theory."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp.transforms.view import view
from jaxcomp.types import Array


class Quadratics(NamedTuple):
    """Heterogeneous least squares: each worker's loss has another minimum.

    Attributes:
        matrices: `[workers, rows, size]`.
        targets: `[workers, rows]`.
        ridge: the weight of `½‖x‖²` in every worker's loss.
        solution: the minimum of the mean of all losses, `[size]`.
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

    @property
    def data(self) -> tuple[Array, Array]:
        """The data of each worker, along the leading axis."""
        return self.matrices, self.targets

    @property
    def smoothnesses(self) -> np.ndarray:
        """`Lᵢ` of every worker's loss, `[workers]`; theory often has `L̃ = √(mean Lᵢ²)`."""
        return _largest_squares(self.matrices) + self.ridge

    def gradient(self, x: Array, matrix: Array, target: Array) -> Array:
        """The gradient of one worker's loss."""
        return matrix.T @ (matrix @ x - target) + self.ridge * x

    def error(self, x: Array) -> Array:
        """`‖x − x*‖² / ‖x*‖²`."""
        return jnp.sum((x - self.solution) ** 2) / jnp.sum(self.solution**2)


class Logistic(NamedTuple):
    """Logistic regression on heterogeneous data.

    Attributes:
        features: `[workers, rows, size]`.
        labels: `[workers, rows]`, of −1 and 1.
        ridge: the weight of `½‖x‖²`.
        solution: the minimum of the mean of all losses, `[size]`.
        smoothness: `L` of the mean loss.
        condition: `κ` of the mean loss at the solution.
    """

    features: Array
    labels: Array
    ridge: float
    solution: Array
    smoothness: float
    condition: float

    @property
    def workers(self) -> int:
        return self.labels.shape[0]

    @property
    def data(self) -> tuple[Array, Array]:
        """The data of each worker, along the leading axis."""
        return self.features, self.labels

    @property
    def smoothnesses(self) -> np.ndarray:
        """`Lᵢ` of every worker's loss, `[workers]`; theory often has `L̃ = √(mean Lᵢ²)`."""
        return _largest_squares(self.features) / (4 * self.labels.shape[1]) + self.ridge

    def gradient(self, x: Array, features: Array, labels: Array) -> Array:
        """The gradient of a worker's loss: the mean of `log(1 + exp(−y ⟨a, x⟩))`, and the ridge."""
        pull = labels * jax.nn.sigmoid(-labels * (features @ x))
        return self.ridge * x - features.T @ pull / labels.shape[0]

    def error(self, x: Array) -> Array:
        """`‖x − x*‖² / ‖x*‖²`."""
        return jnp.sum((x - self.solution) ** 2) / jnp.sum(self.solution**2)

    def accuracy(self, x: Array) -> Array:
        """The fraction of rows that are classified correctly."""
        return jnp.mean(jnp.sign(self.features @ x) == self.labels)


def _largest_squares(matrices: Array) -> np.ndarray:
    """The square of the largest singular value of each matrix."""
    return np.linalg.norm(np.asarray(matrices, np.float64), ord=2, axis=(1, 2)) ** 2


def logistic(features: Any, labels: Any, workers: int, ridge: float = 0.01) -> Logistic:
    """Logistic regression whose rows are sorted before they are assigned to workers.

    Columns are scaled to mean 0 and variance 1. Rows are sorted by label and then by their first
    principal component, so that most workers have only one label. Remaining rows that do not
    divide evenly are dropped.

    Args:
        features: `[rows, columns]`; a column of ones is added.
        labels: `[rows]`, two values.
        workers: the number of workers.
        ridge: `λ`.

    Raises:
        ValueError: for labels of other than two values, or fewer rows than workers.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> a = rng.standard_normal((40, 3))
        >>> logistic(a, a[:, 0] > 0, workers=4).features.shape
        (4, 10, 4)
    """
    kinds = np.unique(labels)
    if len(kinds) != 2 or len(labels) < workers:
        raise ValueError(
            f"`labels` must be of two values and at least {workers} rows, got the values {kinds} "
            f"in {len(labels)} rows"
        )
    a = np.asarray(features, np.float64)
    a = (a - a.mean(axis=0)) / np.where(a.std(axis=0) == 0, 1, a.std(axis=0))
    y = np.where(np.asarray(labels) == kinds[1], 1.0, -1.0)
    order = np.lexsort((a @ np.linalg.svd(a, full_matrices=False)[2][0], y))
    rows = len(y) // workers * workers
    a, y = np.column_stack([a, np.ones(len(a))])[order][:rows], y[order][:rows]
    x = np.zeros(a.shape[1])
    for _ in range(50):  # Newton's method.
        chance = 1 / (1 + np.exp(y * (a @ x)))
        gradient = ridge * x - a.T @ (y * chance) / rows
        curvature = (a.T * (chance * (1 - chance))) @ a / rows + ridge * np.eye(len(x))
        x = x - np.linalg.solve(curvature, gradient)
    values = np.linalg.eigvalsh(curvature)
    return Logistic(
        features=jnp.asarray(a.reshape(workers, -1, len(x))),
        labels=jnp.asarray(y.reshape(workers, -1)),
        ridge=ridge,
        solution=jnp.asarray(x),
        smoothness=float(np.linalg.eigvalsh(a.T @ a / rows)[-1] / 4 + ridge),
        condition=float(values[-1] / values[0]),
    )


def quadratics(
    workers: int = 8, size: int = 50, rows: int = 100, ridge: float = 0.1, seed: int = 0
) -> Quadratics:
    """Heterogeneous least squares: `fᵢ(x) = ½‖Aᵢx − bᵢ‖² + λ/2 ‖x‖²`.

    `Aᵢ` is Gaussian times `(1 + 0.3 i)/√rows`, so workers differ in curvature, and `bᵢ = Aᵢ xᵢ` for
    a separate Gaussian `xᵢ`, so a worker's gradient does not vanish at the solution.

    Args:
        workers: the number of workers.
        size: the number of dimensions.
        rows: the number of rows of each worker's matrix.
        ridge: `λ`.
        seed: the random seed.

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
    """The result of a run.

    Attributes:
        error: `‖x − x*‖² / ‖x*‖²` after each step.
        alike: whether all workers had the same update, bit for bit, at every step.
        params: the final parameters.
        state: the final state of the transformation, with a leading axis of workers.
    """

    error: np.ndarray
    alike: bool
    params: Array
    state: Any


def descend(tx: Any, problem: Quadratics | Logistic, steps: int, axis_name: str = "workers") -> Run:
    """Runs a transformation that averages gradients, on workers simulated by `vmap`.

    Gradients are full, and taken at `jaxcomp.view(params, state)`; a transformation that needs
    gradients at other points gets `grad_fn` and `full_grad_fn`.

    Args:
        tx: for instance `optax.chain(jaxcomp.compressed_mean(...), optax.sgd(rate))`; the
            parameters are `{"x": [1, size]}`.
        problem: the problem to solve, starting from zero.
        steps: the number of steps.
        axis_name: the axis given to `tx`.

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

    inner: Any = optax.with_extra_args_support(tx)

    def one(params, data, state):
        def grad_fn(at):
            return {"x": problem.gradient(at["x"][0], *data)[None]}

        given = {"grad_fn": grad_fn, "full_grad_fn": grad_fn}
        return inner.update(grad_fn(view(params, state)), state, params, **given)

    everyone = jax.vmap(one, in_axes=(None, 0, 0), axis_name=axis_name)

    def step(carry, _):
        params, state = carry
        updates, state = everyone(params, problem.data, state)
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
