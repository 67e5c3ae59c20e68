"""`sharded_optimizer`: two shots with the optimizer between them, of which each has a part."""

import warnings
from typing import Any

import optax

from jaxcomp import checks
from jaxcomp.base import Codec, Gate, Reducer
from jaxcomp.exchange.stepping import Stepper
from jaxcomp.feedback import Link, NoFeedback, Residual
from jaxcomp.layout.policy import Policy
from jaxcomp.numerics import noise
from jaxcomp.reducers import choose
from jaxcomp.reducers.dense import Dense
from jaxcomp.reducers.hierarchical import Hierarchical
from jaxcomp.reducers.two_shot import TwoShot
from jaxcomp.transforms import groups
from jaxcomp.transforms.mean import Setup, check, transformation
from jaxcomp.types import AxisName, PyTree


class ShardedOptimizer(optax.GradientTransformationExtraArgs):
    """The transformation that `sharded_optimizer` returns.

    Attributes:
        reducer: the reducer of both ways, whose bytes are those of a step.
    """

    reducer: Reducer


def sharded_optimizer(
    optimizer: optax.GradientTransformation,
    axis_name: AxisName,
    up: "Codec | Policy | Link",
    down: "Codec | Policy | Link | None" = None,
    *,
    fast: Dense | None = None,
    max_norm: float | None = None,
    gate: Gate | None = None,
    key: Any = 0,
    guard: bool = True,
    param_specs: PyTree | None = None,
    stats: groups.Grouping = False,
) -> ShardedOptimizer:
    """An optimizer of which each worker has a part: its moments and master weights are `1/n`.

    Gradients go up compressed, each worker adds up its part and steps it with its own moments, and
    the updates go down compressed:

        u_i = r_i + optimizer(mean_j D(C_up(g_j))[i], θ[i] + r_i)
        update = concat_i D(C_down(u_i)),   r_i ← u_i − update[i]

    with the replica `θ` on every device, and in float32 the residual `r`, which is the part of the
    updates that the way down, or a narrow dtype of the parameters, has rounded off. It is sent in
    the next step, so that a replica is never further from the master weights `θ + r`, which the
    optimizer sees, than one step's rounding; and replicas are the same bits on all workers. It
    replaces `optax.chain(compressed_mean(...), optimizer)`. Transformations may follow it in the
    chain, and a program may change the parameters in other ways, as with any optimizer.

    Args:
        optimizer: an elementwise optimizer, such as `optax.adamw(3e-4)`. It sees buckets of many
            leaves as matrices, and dense leaves as they are: a mask by the rank of a leaf works,
            one by its name does not. Elementwise are all optimizers of optax and `optax.contrib`
            except adafactor, dadapt_adamw, dog, dowg, dpsgd, fromage, galore, lamb, lars, lbfgs,
            mechanize, momo, momo_adam, muon, noisy_sgd, novograd, polyak_sgd, prodigy, sm3 and
            sophia.
        axis_name: the mapped axis, or a tuple of them.
        up: the codec of the gradients, a `Policy` or a `Link`, with the defaults of
            `compressed_mean`. Leaves that it sends dense are stepped whole on every worker.
        down: the codec of the changes of the weights, or a `Link` with `Residual()`, the default,
            or `NoFeedback()`: then there is no residual, and the errors of an unbiased codec add up
            as a random walk. None for the codec of `up`. It sends the leaves that `up` compresses,
            and needs buckets no longer than those of `up`.
        fast: for an `axis_name` of at least two axes, the last of which is fast: `Dense()`, or
            `Dense("bfloat16")`, scatters gradients and gathers changes over it dense, so that only
            `1/n` of the compressed bytes of each device cross the other axes.
        max_norm: clips the mean gradient at this norm over all parts, as
            `optax.clip_by_global_norm` does; None for no clipping.
        gate: as for `compressed_mean`; a closed round takes no step.
        key: a seed, a raw key or a `jax.random.key`; the same on all workers.
        guard: as for `compressed_mean`; the optimizer's state survives a non-finite step, too.
        param_specs: as for `compressed_mean`.
        stats: as for `compressed_mean`.

    Returns:
        An optax transformation, of which `jaxcomp.describe(tx, params, workers=n)` tells the bytes.
        Its updates need the parameters: `tx.update(grads, state, params)`; a `weight` is as for
        `compressed_mean`. Each worker's state is marked as its own, so that `jaxcomp.init_state`,
        `place`, `resize_workers` and checkpoints treat it as that of a mean. The state of the
        optimizer gets its values in the first step: one that copies the parameters copies those of
        that step. Further arguments of the update reach the optimizer as they are, so they must
        not be trees like the parameters, and the check of `init` tries none but `value`.

    Raises:
        ValueError: on construction, for arguments of the wrong kind, links that do not match, or
            another feedback on the way down; in `init`, for an optimizer that needs whole leaves,
            or that treats leaves differently by their names or shapes; and as `compressed_mean`.

    Example:
        >>> import jaxcomp, optax
        >>> tx = sharded_optimizer(
        ...     optax.adamw(3e-4), "data", jaxcomp.qsgd_inf(bits=4), max_norm=1.0
        ... )

    References:
        Rajbhandari et al., `ZeRO <https://arxiv.org/abs/1910.02054>`_, 2020, stage 1; Jia et al.,
        `SDP4Bit <https://arxiv.org/abs/2410.15526>`_, 2024, for differences of weights in 4 bits.

    Note:
        With `Identity()` both ways it makes the steps of the optimizer after a dense mean. The
        papers keep master weights; with a residual in their place, other changes of the parameters
        are kept too.
    """
    checks.transformation("optimizer", optimizer)
    optimizer = optax.with_extra_args_support(optimizer)
    if max_norm is not None:
        checks.positive("max_norm", max_norm)
    both, remembers = _both_ways(up, down)
    if gate is not None:
        checks.part("gate", gate, Gate)
        gate.check(both.uplink.feedback)  # Which may warn of what closed rounds lose.
    reducer = both if fast is None else Hierarchical(fast, both)
    given = Setup(
        reducer,
        axis_name,
        gate,
        noise.words(key),
        guard,
        stats,
        stepper=Stepper(optimizer, remembers, None if max_norm is None else float(max_norm)),
    )
    check(given, param_specs)
    tx = transformation(given, param_specs)

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> Any:
        if params is None:
            raise ValueError(
                "`params` must be given to the update, which steps a part of them, got None: use "
                "tx.update(grads, state, params)"
            )
        return tx.update(updates, state, params, **extra)

    made = ShardedOptimizer(tx.init, update)
    made.reducer = reducer
    return made


def _both_ways(up: Any, down: Any) -> tuple[TwoShot, bool]:
    """The reducer, and whether the way down has a residual."""
    uplink = choose.link_or_reducer(up)
    if not isinstance(uplink, Link):
        raise ValueError(
            f"`up` must be a codec, a Policy or a Link, since the optimizer is between two ways, "
            f"got {up!r}"
        )
    codec = uplink.codec if down is None else down
    remembers = not isinstance(codec, Link) or codec.feedback == Residual()
    if isinstance(codec, Link):
        if codec.feedback not in (Residual(), NoFeedback()):
            raise ValueError(f"`down` must have Residual() or NoFeedback(), got {codec.feedback!r}")
        codec = codec.codec
    with warnings.catch_warnings():
        if remembers:  # What a biased codec drops.
            warnings.simplefilter("ignore")
        return TwoShot(uplink, Link(codec, NoFeedback())), remembers
