"""Methods for composite and constrained problems."""

import warnings
from collections.abc import Callable
from typing import Any

import optax

from jaxcomp.algorithms.types import Method, Rate
from jaxcomp.base import Codec, Feedback
from jaxcomp.codecs.rotated import Rotated
from jaxcomp.feedback import Link, Residual, default
from jaxcomp.layout import policy as policy_
from jaxcomp.layout.policy import Policy
from jaxcomp.misuse.whole_methods import whole
from jaxcomp.optimizers import prox_adagrad, rda_adagrad
from jaxcomp.optimizers.projections import averaged, projected
from jaxcomp.reducers.gather import Gather
from jaxcomp.transforms.mean import compressed_mean
from jaxcomp.transforms.view import displaced_mean
from jaxcomp.types import AxisName, PyTree


@whole
def qcmd_adagrad(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    learning_rate: Rate,
    regularizer: Any,
    feedback: Feedback | None = None,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """Composite mirror descent with AdaGrad's metric, on quantised gradients: sparse solutions.

    `ĝ = mean Q(gᵢ)`, `H = δ + √Σĝ²`, `x ← argmin γ⟨ĝ, x⟩ + γ r(x) + ½‖x − xᵏ‖²_H`.

    Args:
        codec: the codec of the gradients; `threshold_ternary()` replaces the paper's.
        axis_name: the mapped axis of the workers.
        learning_rate: `γ`.
        regularizer: `r`, such as `jaxcomp.optimizers.L1(1e-3)`.
        feedback: the link's feedback; None for the default of the codec's class, which is a
            residual for the ternary codec, where the paper has none (`NoFeedback()`). `Shift()`
            converges to the exact solution.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for settings out of range or without a regularizer; on use, without `params`.

    Example:
        >>> import jaxcomp
        >>> codec, l1 = jaxcomp.threshold_ternary(), jaxcomp.optimizers.L1(1e-3)
        >>> tx = jaxcomp.algorithms.qcmd_adagrad(codec, "data", learning_rate=0.1, regularizer=l1)

    References:
        Xu et al., `Quantized adaptive subgradient algorithms and their applications
        <https://arxiv.org/abs/2208.05631>`_, 2022.

    Note:
        Guarantee: with an unbiased codec, that of AdaGrad's mirror descent, `O(1/√T)` for the mean
        of all iterates, plus the codec's noise; we could not read the paper's own bound, with its
        quantisation error. The method is reconstructed from the abstract, which describes the
        metric of quantised gradients and a threshold quantiser of small error. Its definition was
        not available, so the optimal ternary quantiser replaces it. A ternary code with a threshold
        is biased, and without feedback it stalls with heterogeneous workers. Chain nothing after
        this method that changes the parameters.
    """
    reducer = _gather_link(codec, feedback)
    mean = compressed_mean(reducer, axis_name, key=key, param_specs=param_specs)
    return optax.chain(mean, prox_adagrad(learning_rate, regularizer))


@whole
def qrda_adagrad(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    learning_rate: Rate,
    regularizer: Any,
    feedback: Feedback | None = None,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """`qcmd_adagrad` by regularised dual averaging, whose solutions are sparser.

    `x ← argmin γ⟨Σĝ, x⟩ + γ t r(x) + ½‖x‖²_H` after `t` steps.

    Args:
        codec: the codec of the gradients; `threshold_ternary()` replaces the paper's.
        axis_name: the mapped axis of the workers.
        learning_rate: `γ`.
        regularizer: `r`, such as `jaxcomp.optimizers.L1(1e-3)`.
        feedback: the link's feedback, as for `qcmd_adagrad`.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for the same reasons as `qcmd_adagrad`.

    Example:
        >>> import jaxcomp
        >>> codec, l1 = jaxcomp.threshold_ternary(), jaxcomp.optimizers.L1(1e-3)
        >>> tx = jaxcomp.algorithms.qrda_adagrad(codec, "data", learning_rate=0.1, regularizer=l1)

    References:
        See `qcmd_adagrad`.

    Note:
        The guarantee and the reconstruction are those of `qcmd_adagrad`. Dual averaging starts at
        zero, whatever the initial parameters. It uses the whole sum of gradients, so it finds zeros
        that the noise of single messages hides from `qcmd_adagrad`.
    """
    reducer = _gather_link(codec, feedback)
    mean = compressed_mean(reducer, axis_name, key=key, param_specs=param_specs)
    return optax.chain(mean, rda_adagrad(learning_rate, regularizer))


@whole
def dgd_def(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    learning_rate: float,
    key: Any = 0,
) -> Method:
    """Descent by democratically coded gradients, taken at the point that exact descent would reach.

    `z = x + γe`, `u = ∇f(z) − e`, send `q = D(E(u))`, `e ← q − u`, `x ← x − γ q`.

    Args:
        codec: a contractive codec; the paper's is `ndsc(bits, dithered=False)`.
        axis_name: the mapped axis of the workers.
        learning_rate: `γ`; `2/(L + μ)`.
        key: a seed or key, the same on all workers.

    Raises:
        ValueError: for a learning rate that is negative, or a codec whose residual would grow.

    Example:
        >>> import jaxcomp
        >>> codec = jaxcomp.ndsc(2, dithered=False)
        >>> tx = jaxcomp.algorithms.dgd_def(codec, "data", learning_rate=0.1)

    References:
        Saha, Pilanci and Goldsmith, `Efficient randomized subspace embeddings for distributed
        optimization under a communication budget <https://arxiv.org/abs/2103.07578>`_, 2022.

    Note:
        Guarantee: for smooth and strongly convex losses and one worker, the linear rate
        `max{ν, β_R}`, where `ν` is the rate of descent without quantisation and `β_R` falls as
        `2^−R`, times about `√log d` for this code: at 512 elements, one bit did not converge in our
        measurements; two bits, and one of `dsc`, did. Take the loss at
        `jaxcomp.view(params, state)`.
        The paper has one worker. With several workers, each has its own `e` and its own point, and
        their messages are averaged; this extension is ours, and reaches a neighbourhood.
    """
    with warnings.catch_warnings():
        # The paper's code is contractive for nearly every rotation, but a link cannot know that.
        if all(isinstance(one, Rotated) and not one.shared for one in policy_.of(codec).codecs):
            warnings.simplefilter("ignore", UserWarning)
        link = Link(codec, Residual())
    mean = displaced_mean(Gather(link), axis_name, learning_rate=learning_rate, key=key)
    return optax.chain(mean, optax.sgd(learning_rate))


@whole
def dq_psgd(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    learning_rate: Rate,
    projection: Callable[[PyTree], PyTree],
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """Projected stochastic subgradient descent by dithered democratic codes.

    `x ← Π(x − γ · mean Q(gᵢ))`. The mean of all `x` converges: `jaxcomp.optimizers.average(state)`.

    Args:
        codec: an unbiased codec; the paper's is `ndsc(bits)`, for less than one bit too.
        axis_name: the mapped axis of the workers.
        learning_rate: `γ`.
        projection: `Π`, a function from parameters to the nearest allowed ones, such as
            `optax.projections.projection_l2_ball`.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for a projection that is not a function; on use, without `params`.

    Example:
        >>> import jaxcomp, optax
        >>> ball = lambda params: optax.projections.projection_l2_ball(params, 1.0)
        >>> settings = {"learning_rate": 0.1, "projection": ball}
        >>> tx = jaxcomp.algorithms.dq_psgd(jaxcomp.ndsc(2), "data", **settings)

    References:
        See `dgd_def`.

    Note:
        Guarantee: `O(1/√(min(1, R)·T))` at the mean iterate, for convex losses with bounded
        subgradients on a bounded set. Gradients are taken at `x`, as in the paper; its code takes
        them at the mean iterate. The paper has one worker; with several, messages are averaged.
    """
    mean = compressed_mean(Gather(Link(codec)), axis_name, key=key, param_specs=param_specs)
    return optax.chain(mean, optax.sgd(learning_rate), projected(projection), averaged())


def _gather_link(codec: Codec | Policy, feedback: Feedback | None) -> Gather:
    return Gather(Link(codec, default(codec) if feedback is None else feedback))
