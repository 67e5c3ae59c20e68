"""Problems with an l1 norm or a ball, compared by the gap of the objective."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from convergence import AXIS, Prices, Way, everywhere, price
from sklearn.svm import LinearSVC

import jaxcomp
from jaxcomp import algorithms, codecs, optimizers
from jaxcomp.testing import problems

Problem = Any


class Composite(NamedTuple):
    """Losses of workers with an l1 norm, or inside a ball.

    Attributes:
        loss: "logistic" or "hinge", the mean over a worker's rows.
        features: `[workers, rows, size]`.
        labels: `[workers, rows]`, of −1 and 1.
        weight: of the l1 norm.
        solution: `[size]`.
    """

    loss: str
    features: Any
    labels: Any
    weight: float
    solution: Any

    @property
    def workers(self) -> int:
        return self.labels.shape[0]

    @property
    def data(self) -> tuple[Any, Any]:
        return self.features, self.labels

    def gradient(self, x: Any, features: Any, labels: Any) -> Any:
        """A subgradient of one worker's loss, without the norm."""
        margin = labels * (features @ x)
        slope = margin < 1 if self.loss == "hinge" else jax.nn.sigmoid(-margin)
        return -features.T @ (labels * slope) / labels.shape[0]

    def objective(self, x: Any) -> Any:
        margin = self.labels * (self.features @ x)
        losses = jax.nn.relu(1 - margin) if self.loss == "hinge" else jnp.logaddexp(0, -margin)
        return jnp.mean(losses) + self.weight * jnp.sum(jnp.abs(x))

    def error(self, x: Any) -> Any:
        """`(F(x) − F*) / (F(0) − F*)`."""
        least, start = self.objective(self.solution), self.objective(jnp.zeros_like(self.solution))
        return (self.objective(x) - least) / (start - least)

    def accuracy(self, x: Any) -> Any:
        return jnp.mean(jnp.sign(self.features @ x) == self.labels)


def with_l1(features: Any, labels: Any, workers: int, weight: float = 0.02) -> Composite:
    """Logistic regression with an l1 norm, whose solution accelerated descent has found."""
    dealt = problems.logistic(features, labels, workers)
    problem = Composite("logistic", *dealt.data, weight, dealt.solution)
    step = 1 / (dealt.smoothness - dealt.ridge)

    def forward(carry: Any, _: Any) -> tuple[Any, None]:
        x, y, t = carry
        slopes = jax.vmap(problem.gradient, in_axes=(None, 0, 0))(y, *problem.data)
        z = y - step * slopes.mean(axis=0)
        new = jnp.sign(z) * jax.nn.relu(jnp.abs(z) - step * weight)
        back = jnp.vdot(y - new, new - x) > 0  # Momentum restarts when it points uphill.
        after = jnp.where(back, 1.0, (1 + jnp.sqrt(1 + 4 * t**2)) / 2)
        ahead = jnp.where(back, new, new + (t - 1) / after * (new - x))
        return (new, ahead, after), None

    start = jnp.zeros_like(problem.solution)
    run = jax.jit(lambda s: jax.lax.scan(forward, (s, s, jnp.ones(())), None, length=200_000))
    return problem._replace(solution=run(start)[0][0])


def in_a_ball(features: Any, labels: Any, workers: int) -> tuple[Composite, float]:
    """A support vector machine in a ball, and the radius of the ball.

    The minimiser with a ridge also minimises the loss without a ridge over all points whose norm is
    at most its own. Its norm is the radius.
    """
    dealt = problems.logistic(features, labels, workers)
    a, y = np.asarray(dealt.features), np.asarray(dealt.labels)
    rows = a.reshape(-1, a.shape[-1])
    machine = LinearSVC(
        loss="hinge", C=1 / y.size, fit_intercept=False, tol=1e-10, max_iter=10**6, random_state=0
    )
    solution = jnp.asarray(machine.fit(rows, y.ravel()).coef_[0])
    problem = Composite("hinge", dealt.features, dealt.labels, 0.0, solution)
    return problem, float(jnp.linalg.norm(solution))


def proximal(problem: Composite) -> dict[str, Way]:
    """QCMD and QRDA with each kind of quantisation, and with none."""
    size = problem.solution.size
    threshold = everywhere(jaxcomp.threshold_ternary(bucket_size=size))
    stochastic = everywhere(jaxcomp.terngrad(clip=None, bucket_size=size))
    ways = {
        "not quantised": (everywhere(codecs.Identity()), None),
        "stochastic ternary": (stochastic, None),
        "threshold, nothing fed back": (threshold, jaxcomp.NoFeedback()),
        "threshold, residuals": (threshold, jaxcomp.Residual()),
        "threshold, shifts": (threshold, jaxcomp.Shift()),
    }
    found = {}
    for make in (algorithms.qcmd_adagrad, algorithms.qrda_adagrad):
        for name, (codec, feedback) in ways.items():
            tx = make(
                codec,
                AXIS,
                learning_rate=0.1,
                regularizer=optimizers.L1(problem.weight),
                feedback=feedback,
            )
            prices = Prices(price(codec, size), 0.0, 64.0 * size, problem.workers)
            found[f"{make.__name__}, {name}"] = Way(tx, prices, make is algorithms.qcmd_adagrad)
    return found


def subgradients(problem: Composite, radius: float) -> dict[str, Way]:
    """DQ-PSGD with codes of several lengths, and whole subgradients."""
    size = problem.solution.size

    def ball(tree: Any) -> Any:
        return optax.projections.projection_l2_ball(tree, radius)

    def rate(step: Any) -> Any:
        return 0.3 * radius / jnp.sqrt(1.0 + step)

    found = {}
    for bits in (None, 4, 2, 1, 0.5):
        code = codecs.Identity() if bits is None else jaxcomp.ndsc(bits=bits, bucket_size=size)
        codec = everywhere(code)
        tx = algorithms.dq_psgd(codec, AXIS, learning_rate=rate, projection=ball)
        prices = Prices(price(codec, size), 0.0, 64.0 * size, problem.workers)
        named = {None: "whole subgradients", 1: "1 bit"}.get(bits, f"{bits} bits")
        found[f"dq_psgd, {named}"] = Way(tx, prices, averaged=True)
    return found
