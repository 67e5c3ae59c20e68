"""Optimizers that compress their momentum rather than the gradient."""

from typing import Any

import optax

from jaxcomp import feedback
from jaxcomp.base import Codec
from jaxcomp.feedback import Link
from jaxcomp.layout.policy import Policy
from jaxcomp.misuse.whole_methods import whole
from jaxcomp.optimizers.moments import Adam
from jaxcomp.optimizers.one_bit_adam import scale_by_one_bit_adam
from jaxcomp.optimizers.zero_one_adam import Intervals, by_zero_one_adam
from jaxcomp.reducers.dense import Dense
from jaxcomp.reducers.two_shot import TwoShot
from jaxcomp.transforms.mean import compressed_mean
from jaxcomp.types import AxisName, PyTree


def one_bit_adam(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    freeze_step: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam with a dense warm-up, then momentum in one bit an element over a frozen variance.

    Up to step `freeze_step` it is Adam on the dense mean of the gradients. Then `v` is frozen, and
    `m ← C̄(b1·m + (1 − b1)·gᵢ)`, where `C̄` is the two-shot mean over the workers, compressed with
    error feedback on uplink and downlink. Returns `m/(√v̂ + ε) + λx`, like `optax.scale_by_adam`.

    Args:
        codec: the codec of uplink and downlink, with buckets, such as the paper's `sign()`; a
            contractive codec gets `Residual()`.
        axis_name: the mapped axis.
        freeze_step: the number of warm-up steps: usually 15 to 25 % of all steps (from memory), and
            at least a few multiples of `1/(1 − b2)`.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: `ε`.
        weight_decay: `λ`, decoupled; a value above zero needs `params` in the update.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Returns:
        The direction of the step from local gradients: chain no `compressed_mean` before it, and
        the learning rate after it.

    Raises:
        ValueError: for settings out of range, or a codec that cannot be split over the workers.

    Example:
        >>> import jaxcomp, optax
        >>> scaled = jaxcomp.algorithms.one_bit_adam(jaxcomp.sign(), "data", freeze_step=5000)
        >>> tx = optax.chain(scaled, optax.scale_by_learning_rate(1e-3))

    References:
        Tang et al., `1-bit Adam: communication efficient large-scale training with Adam's
        convergence speed <https://arxiv.org/abs/2102.02888>`_, 2021.

    Note:
        Guarantee: with a frozen variance and bounded compression error, the order of SGD for
        smooth losses and stochastic gradients, `O(1/√(nT))` (from memory). With full gradients and
        heterogeneous workers it reaches only a neighbourhood, as error feedback does.

        The warm-up corrects the bias of the moments as Adam does, and freezes the corrected
        variance; the published code does neither. The published code scales a chunk by its root
        mean square, which is not contractive for a sparse chunk; `sign` scales a bucket by its mean
        magnitude. One bit cannot represent zero: in the published code the user masks momentum
        that is always zero; here, an element without a gradient in the whole warm-up is not
        updated.
    """
    dense, lossy = _means(codec, axis_name, key, param_specs)
    adam = scale_by_one_bit_adam(
        dense, lossy, axis_name, freeze_step=freeze_step, b1=b1, b2=b2, eps=eps
    )
    decay = optax.add_decayed_weights(weight_decay) if weight_decay else optax.identity()
    return optax.chain(adam, decay)


@whole
def zero_one_adam(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    learning_rate: optax.ScalarOrSchedule,
    freeze_step: int,
    renewals: int = 16,
    double_every: int = 32678,
    max_interval: int = 16,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> optax.GradientTransformationExtraArgs:
    """0/1 Adam: rare updates of the variance, one-bit momentum, and local steps.

    Up to step `freeze_step`, `v` is updated from dense means at intervals that double, and in the
    steps between, `m` is updated from means of one bit an element. Afterwards each worker takes up
    to 16 local steps `oᵢ ← oᵢ − γmᵢ/D` with `D = √v̂ + ε`, and then all communicate:
    `m ← C̄(−oᵢ·D/Σγ)`, `x ← x − Σγ·m/D`. Take the loss at `jaxcomp.view(params, state)`, which adds
    `oᵢ`.

    Args:
        codec: the codec of uplink and downlink, with buckets, such as the paper's `sign()`; a
            contractive codec gets `Residual()`.
        axis_name: the mapped axis.
        learning_rate: `γ`, or a schedule of it.
        freeze_step: the last step that may update the variance: usually the end of the learning
            rate's warm-up.
        renewals: the number of variance updates before their interval doubles.
        double_every: the number of steps before the interval between communications doubles.
        max_interval: the largest number of local steps between communications; 1 communicates in
            every step.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: `ε`.
        weight_decay: applied to the centre, times the learning rate, at every communication.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Returns:
        A complete optimizer that takes local gradients: chain no `compressed_mean` before it.

    Raises:
        ValueError: for settings out of range, or a codec that cannot be split over the workers.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.algorithms.zero_one_adam(
        ...     jaxcomp.sign(), "data", learning_rate=1e-3, freeze_step=5000, max_interval=8
        ... )

    References:
        Lu et al., `Maximizing communication efficiency for large-scale training via 0/1 Adam
        <https://arxiv.org/abs/2202.06009>`_, 2022.

    Note:
        Guarantee: as for `one_bit_adam`, plus a term for the local steps (from memory); with full
        gradients and heterogeneous workers it reaches only a neighbourhood. By default the
        intervals double after 16 variance updates and after 32,678 steps, as in the published code.

        `step_by_zero_one_adam` lists the differences from the published code: messages in units of
        momentum, bias-corrected moments, the paper's own intervals, and decay of the centre.
        Scales are those of `sign`, as in `one_bit_adam`.
    """
    dense, lossy = _means(codec, axis_name, key, param_specs)
    adam = Adam(freeze_step, b1, b2, eps)
    intervals = Intervals(renewals, double_every, max_interval)
    return by_zero_one_adam(learning_rate, dense, lossy, axis_name, adam, intervals, weight_decay)


def _means(
    codec: Codec | Policy, axis_name: AxisName, key: Any, param_specs: PyTree | None
) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """A dense mean, and a mean that is compressed on uplink and downlink."""
    link = Link(codec, feedback.default(codec))
    dense = compressed_mean(Dense(), axis_name, param_specs=param_specs)
    two_shot = TwoShot(up=link, down=link)
    return dense, compressed_mean(two_shot, axis_name, key=key, param_specs=param_specs)
