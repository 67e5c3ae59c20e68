"""Variance-reduced methods for finite sums, and their baseline, mostly decentralised."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp.algorithms.decentralised import Sent, neighbours
from jaxcomp.algorithms.types import Mean, Method, Rate
from jaxcomp.base import Graph, Period
from jaxcomp.feedback import NoFeedback
from jaxcomp.gates import Growing
from jaxcomp.graphs import Ring
from jaxcomp.misuse.whole_methods import whole
from jaxcomp.optimizers import rates
from jaxcomp.optimizers.regularizers import Regularizer
from jaxcomp.transforms.gossip import gossip
from jaxcomp.transforms.mean import compressed_mean
from jaxcomp.transforms.snapshots import variance_reduced
from jaxcomp.transforms.wrappers import per_worker
from jaxcomp.types import Array, AxisName, PyTree


def _near(
    regularizer: Regularizer | None, learning_rate: Rate
) -> Callable[[PyTree, Array], PyTree] | None:
    """The proximal point of a step."""
    if regularizer is None:
        return None

    def prox(params: PyTree, taken: Array) -> PyTree:
        rate = rates.at(learning_rate, taken)
        return jax.tree.map(lambda x: regularizer.nearest(x, jnp.ones_like(x), rate), params)

    return prox


@whole
def dspg(
    codec: Sent,
    axis_name: AxisName,
    *,
    learning_rate: Rate,
    regularizer: Regularizer | None = None,
    mixing: float = 1.0,
    graph: Graph = Ring(),
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """Decentralised stochastic proximal gradient: `dpsgd`, and then a proximal step.

    `xᵢ ← prox_{η h}(Σⱼ wᵢⱼ (xⱼ − η gⱼ))`.

    Args:
        codec: the codec of the models, as for `dpsgd`, or a `Link`.
        axis_name: the mapped axis of the workers.
        learning_rate: `η`, a number or an optax schedule such as `lambda t: a / jnp.sqrt(1 + t)`.
        regularizer: `h`, one of `jaxcomp.optimizers`, such as `L1(1e-3)`; None for none.
        mixing: `γ`.
        graph: the graph of the workers.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `gossip`.

    Raises:
        ValueError: for arguments of the wrong kind, or a codec that gossip cannot use.

    Example:
        >>> import jaxcomp
        >>> codec, sparse = jaxcomp.codecs.Identity(), jaxcomp.optimizers.L1(1e-3)
        >>> tx = jaxcomp.algorithms.dspg(codec, "data", learning_rate=0.1, regularizer=sparse)

    References:
        The baseline of Li et al., `Decentralized stochastic proximal gradient descent with variance
        reduction over time-varying networks <https://arxiv.org/abs/2112.10389>`_, 2021.

    Note:
        Guarantee: `O(1/√T)` for convex losses with steps of `α/√t`.
    """
    near, reducer = _near(regularizer, learning_rate), neighbours(graph, codec, NoFeedback())
    step = optax.sgd(learning_rate)
    return gossip(
        step, reducer, axis_name, mixing=mixing, prox=near, key=key, param_specs=param_specs
    )


@whole
def dpsvrg(
    codec: Sent,
    axis_name: AxisName,
    *,
    learning_rate: Rate,
    first: int = 10,
    factor: float = 1.5,
    most: int = 8,
    regularizer: Regularizer | None = None,
    mixing: float = 1.0,
    graph: Graph = Ring(),
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """DPSVRG: variance-reduced gradients, and more rounds of gossip the longer an epoch lasts.

    Epoch `s` has `⌈first · factorˢ⌉` steps. Step `k` of an epoch takes
    `v = ∇ℓ(xᵢ) − ∇ℓ(x̃ᵢ) + ∇fᵢ(x̃ᵢ)`, mixes `xᵢ − η v` in `min(k, most)` rounds, and takes the
    proximal point; `x̃ᵢ` is the mean of the last epoch's iterates.

    Args:
        codec: the codec of the models, as for `dpsgd`, or a `Link`.
        axis_name: the mapped axis of the workers.
        learning_rate: `η`, which may be constant.
        first: the steps of the first epoch.
        factor: `β`, by which epochs grow.
        most: the largest number of rounds of gossip in a step.
        regularizer: `h`, one of `jaxcomp.optimizers`; None for none.
        mixing: `γ`.
        graph: the graph of the workers, which may change from round to round.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `gossip`.

    Raises:
        ValueError: for arguments of the wrong kind; on use, without `grad_fn` or `full_grad_fn`.

    Example:
        >>> import jaxcomp
        >>> codec = jaxcomp.codecs.Identity()
        >>> tx = jaxcomp.algorithms.dpsvrg(codec, "data", learning_rate=0.1)

        `tx.update(grads, state, params, grad_fn=grad_fn, full_grad_fn=full_grad_fn)`

    References:
        Li et al., `Decentralized stochastic proximal gradient descent with variance reduction over
        time-varying networks <https://arxiv.org/abs/2112.10389>`_, 2021.

    Note:
        Guarantee: `O(1/T)` for convex losses with a constant step. The number of rounds is `k` in
        the paper, without a limit. `first`, `factor` and `most` are not the paper's.
    """
    lengths, near = Growing(first, factor), _near(regularizer, learning_rate)
    step = optax.chain(variance_reduced(lengths), optax.sgd(learning_rate))

    def rounds(taken: Array) -> Array:
        return jnp.minimum(lengths.position(taken) + 1, most)

    reducer = neighbours(graph, codec, NoFeedback())
    settings = {"mixing": mixing, "prox": near, "key": key, "param_specs": param_specs}
    return gossip(step, reducer, axis_name, rounds=rounds, **settings)


def qsvrg(
    codec: Mean,
    axis_name: AxisName,
    *,
    every: int | Period = 100,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """QSVRG: variance-reduced gradients behind a compressed mean.

    Returns `mean Q(∇ℓᵢ(x) − ∇ℓᵢ(x̃) + ∇fᵢ(x̃))`.

    Args:
        codec: `Q`, unbiased, or a reducer, as for `compressed_mean`.
        axis_name: the mapped axis of the workers.
        every: the steps of an epoch, or a period such as `jaxcomp.gates.Growing(10, 1.5)`.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for arguments of the wrong kind; on use, without `grad_fn` or `full_grad_fn`.

    Example:
        >>> import jaxcomp, optax
        >>> mean = jaxcomp.algorithms.qsvrg(jaxcomp.qsgd(bits=4), "data")
        >>> tx = optax.chain(mean, optax.sgd(0.1))

        `tx.update(grads, state, params, grad_fn=grad_fn, full_grad_fn=full_grad_fn)`

    References:
        Alistarh et al., `QSGD: communication-efficient SGD via gradient quantization and encoding
        <https://arxiv.org/abs/1610.02132>`_, 2017.

    Note:
        Guarantee: linear convergence for smooth and strongly convex losses if all workers draw from
        the same data. If they differ, the messages do not vanish at the solution, and neither does
        the codec's noise: a `Link` with `Shift` removes it. The snapshot is the mean of the last
        epoch's iterates, whose full gradient is not quantised on its own.
    """
    mean = compressed_mean(codec, axis_name, key=key, param_specs=param_specs)
    return optax.chain(per_worker(variance_reduced(every)), mean)
