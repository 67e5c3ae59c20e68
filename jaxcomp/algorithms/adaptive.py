"""Optimizers that compress what they make of gradients, by their papers."""

from typing import Any

import optax

from jaxcomp import feedback
from jaxcomp.base import Codec
from jaxcomp.feedback import Link
from jaxcomp.layout.policy import Policy
from jaxcomp.misuse.callers import whole
from jaxcomp.optimizers.moments import Adam
from jaxcomp.optimizers.one_bit_adam import scale_by_one_bit_adam
from jaxcomp.optimizers.zero_one_adam import Intervals, by_zero_one_adam
from jaxcomp.reducers.dense import Dense
from jaxcomp.reducers.two_shot import TwoShot
from jaxcomp.transforms.mean import compressed_mean
from jaxcomp.types import AxisName, PyTree


@whole
def one_bit_adam(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    learning_rate: optax.ScalarOrSchedule,
    freeze_step: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam with a dense warm-up, then momentum in one bit an element over a frozen variance.

    Up to step `freeze_step`, Adam on the dense mean of the gradients. Then `v` stays, and
    `m ← C̄(b1·m + (1 − b1)·gᵢ)`, `x ← x − γ(m/(√v̂ + ε) + λx)`, where `C̄` is the mean over the
    workers in two shots, compressed and with error feedback on both ways.

    Args:
        codec: of both ways, with buckets, such as the paper's `sign()`; contractive codecs get
            `Residual()`.
        axis_name: the mapped axis.
        learning_rate: `γ`, or a schedule of it.
        freeze_step: how many steps of warm-up: 15 to 25 % of all steps are usual (from memory), and
            at least a few multiples of `1/(1 − b2)`.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: `ε`.
        weight_decay: `λ`, decoupled; others than zero need `params` in the update.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as of `compressed_mean`.

    Returns:
        A whole optimizer, to be given local gradients: no `compressed_mean` goes before it.

    Raises:
        ValueError: for settings out of range, or a codec that cannot be shared out.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxcomp.recipes.quantizers import sign
        >>> tx = one_bit_adam(sign(), "data", learning_rate=1e-3, freeze_step=5000)
        >>> tx.init({"w": jnp.zeros((32, 64))})[0].count
        Array(0, dtype=int32)

    References:
        Tang et al., `1-bit Adam: communication efficient large-scale training with Adam's
        convergence speed <https://arxiv.org/abs/2102.02888>`_, 2021.

    Note:
        Guarantee: with the variance frozen and what codecs lose bounded, the order of SGD for
        smooth losses and stochastic gradients, `O(1/√(nT))` (from memory). With full gradients and
        workers that disagree it stays in a neighbourhood, as error feedback does.

        The warm-up corrects moments as Adam does, and the variance is frozen as corrected; the
        published code does neither. Its scale of a chunk is the root mean square, which is no
        contraction of a sparse chunk; `sign`'s is the mean magnitude of a bucket. One bit cannot
        say zero: the published code has momentum that is always zero masked by hand; here, what has
        no gradient in the whole warm-up stays as it is.
    """
    dense, lossy = _means(codec, axis_name, key, param_specs)
    adam = scale_by_one_bit_adam(
        dense, lossy, axis_name, freeze_step=freeze_step, b1=b1, b2=b2, eps=eps
    )
    decay = optax.add_decayed_weights(weight_decay) if weight_decay else optax.identity()
    return optax.chain(adam, decay, optax.scale_by_learning_rate(learning_rate))


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
    """0/1 Adam: a variance renewed ever more rarely, one bit in between, and local steps after it.

    Up to step `freeze_step`, `v` is renewed from dense means at intervals that double, and between
    them `m` from means of one bit an element. Then workers take up to 16 local steps
    `oᵢ ← oᵢ − γmᵢ/D` over `D = √v̂ + ε`, and meet: `m ← C̄(−oᵢ·D/Σγ)`, `x ← x − Σγ·m/D`. Take the
    loss at `jaxcomp.view(params, state)`, which adds `oᵢ`.

    Args:
        codec: of both ways, with buckets, such as the paper's `sign()`; contractive codecs get
            `Residual()`.
        axis_name: the mapped axis.
        learning_rate: `γ`, or a schedule of it.
        freeze_step: the last step that may renew the variance: usually, where the learning rate has
            finished its warm-up.
        renewals: how many renewals there are at one interval.
        double_every: steps until the interval between meetings doubles.
        max_interval: the most local steps to a meeting; 1 for one at every step.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: `ε`.
        weight_decay: of the centre, times the learning rate, at every meeting.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as of `compressed_mean`.

    Returns:
        A whole optimizer, to be given local gradients: no `compressed_mean` goes before it.

    Raises:
        ValueError: for settings out of range, or a codec that cannot be shared out.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxcomp.transforms.view import view
        >>> from jaxcomp.recipes.quantizers import sign
        >>> tx = zero_one_adam(
        ...     sign(), "data", learning_rate=1e-3, freeze_step=5000, max_interval=8
        ... )
        >>> params = {"w": jnp.zeros((32, 64))}
        >>> view(params, tx.init(params))["w"].shape
        (32, 64)

    References:
        Lu et al., `Maximizing communication efficiency for large-scale training via 0/1 Adam
        <https://arxiv.org/abs/2202.06009>`_, 2022.

    Note:
        Guarantee: as `one_bit_adam`, with a term more for the local steps (from memory); with full
        gradients and workers that disagree, a neighbourhood. Intervals double after 16 renewals and
        after 32,678 steps, as in the published code.

        `step_by_zero_one_adam` lists what differs from the published code: messages in units of
        momentum, corrected moments, the paper's own intervals, and decay of the centre. Scales are
        `sign`'s, as in `one_bit_adam`.
    """
    dense, lossy = _means(codec, axis_name, key, param_specs)
    adam = Adam(freeze_step, b1, b2, eps)
    intervals = Intervals(renewals, double_every, max_interval)
    return by_zero_one_adam(learning_rate, dense, lossy, axis_name, adam, intervals, weight_decay)


def _means(
    codec: Codec | Policy, axis_name: AxisName, key: Any, param_specs: PyTree | None
) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """A dense mean, and one that is compressed on both ways."""
    link = Link(codec, feedback.default(codec))
    dense = compressed_mean(Dense(), axis_name, param_specs=param_specs)
    two_shot = TwoShot(up=link, down=link)
    return dense, compressed_mean(two_shot, axis_name, key=key, param_specs=param_specs)
