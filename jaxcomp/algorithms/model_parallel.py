"""Published ways to train sharded models, as short compositions of collectives."""

import functools
from collections.abc import Callable
from typing import Any

from jaxcomp.base import Codec
from jaxcomp.codecs.identity import Identity
from jaxcomp.collectives import all_to_all, psum, pvary
from jaxcomp.collectives.stages import pass_on
from jaxcomp.feedback import Link, Residual
from jaxcomp.layout.policy import Policy
from jaxcomp.recipes.floats import mx
from jaxcomp.recipes.quantizers import blockwise, qsgd_inf
from jaxcomp.recipes.rotations import rotated_uniform
from jaxcomp.types import Array, AxisName, PyTree

EIGHT, MXFP8 = qsgd_inf(bits=8), mx("mxfp8")


def zero_pp() -> dict[str, Any]:
    """ZeRO++: weights in blocks of 8 bits, gradients in blocks of 4, each rounded once an axis.

    Returns:
        The codecs of `jaxcomp.fully_sharded`, by the names of its arguments.

    Example:
        >>> import jax, jaxcomp
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh, loss = jax.make_mesh((1,), ("fsdp",)), lambda w, x: ((x @ w) ** 2).mean()
        >>> f = jaxcomp.fully_sharded(loss, mesh, "fsdp", P("fsdp"), **zero_pp())

    References:
        Wang et al., `ZeRO++ <https://arxiv.org/abs/2306.10209>`_, 2023: qwZ and qgZ.

    Note:
        Deviation: gradients are rounded without bias, where the paper rounds to nearest. For hpZ,
        which gathers over nodes once in a step, split parameters over two axes, and give
        `policy=jaxcomp.second_copy` to the `jax.checkpoint` of a layer.
    """
    return {"weights": blockwise(bits=8), "gradients": qsgd_inf(bits=4, bucket_size=128)}


def qsdp() -> dict[str, Any]:
    """QSDP: weights and gradients in buckets of 1,024 with 8 bits, both rounded without bias.

    Returns:
        The codecs of `jaxcomp.fully_sharded`, by the names of its arguments.

    Example: see `zero_pp`.

    References:
        Markov et al., `Quantized Distributed Training of Large Models with Convergence Guarantees
        <https://arxiv.org/abs/2302.02390>`_, 2023.

    Note:
        Weights are on a lattice with a random shift that all workers share, as in the paper: a
        dither that decoders subtract. Deviation: a bucket's scale is its largest element, where the
        paper's is the range between the smallest and the largest.
    """
    shifted = qsgd_inf(bits=8, bucket_size=1024, levels="midrise", subtractive=True)
    return {"weights": shifted, "gradients": qsgd_inf(bits=8, bucket_size=1024)}


def sdp4bit() -> dict[str, Any]:
    """SDP4Bit: changes of the weights in 4 bits, rotated gradients in 4 bits.

    Returns:
        The links of `jaxcomp.sharded_optimizer`, by the names of its arguments; with two axes the
        fast one is dense by `fast=jaxcomp.Dense()`.

    Example:
        >>> import jaxcomp, optax
        >>> tx = jaxcomp.sharded_optimizer(
        ...     optax.adamw(3e-4), ("dcn", "ici"), **sdp4bit(), fast=jaxcomp.Dense("bfloat16")
        ... )

    References:
        Jia et al., `SDP4Bit <https://arxiv.org/abs/2410.15526>`_, 2024.

    Note:
        Deviations: changes are sent with a residual as their memory, so what 4 bits leave out is
        sent in the next step; gradients are rounded without bias; within a node they are dense,
        or bfloat16, where the paper sends 8 bits.
    """
    return {
        "up": rotated_uniform(bits=4, bucket_size=2048),
        "down": qsgd_inf(bits=4, bucket_size=128),
    }


def loco(decay: float = 0.9) -> dict[str, Any]:
    """LoCo: gradients in 4 bits with a decaying residual, which is stored in 8 bits.

    The residual is that of the whole gradient on every worker: an eighth of the memory of two
    float32 moments of an unsharded Adam.

    Args:
        decay: the fraction of the residual that is kept.

    Returns:
        The links of `jaxcomp.sharded_optimizer`, by the names of its arguments.

    Raises:
        ValueError: for a `decay` outside of [0, 1].

    Example:
        >>> import jaxcomp, optax
        >>> tx = jaxcomp.sharded_optimizer(optax.adamw(3e-4), "data", **loco(), max_norm=1.0)

    References:
        Xie et al., `LoCo <https://arxiv.org/abs/2407.04480>`_, 2024.

    Note:
        Deviations: the residual decays, where the paper keeps a moving average of errors and
        clears it every few hundred steps; scales are those of blocks, where the paper's are fixed.
        Changes of the weights go down in 8 bits with a residual; the paper sends bfloat16.
    """
    up = Link(blockwise(bits=4), Residual(decay=decay, dtype="int8"))
    return {"up": up, "down": blockwise(bits=8)}


def tensor_parallel(
    block: Callable[..., PyTree],
    axis_name: AxisName,
    codec: "Codec | Policy | None" = EIGHT,
    *,
    back: "Codec | Policy | None" = None,
) -> Callable[..., PyTree]:
    """A block that is split over workers: its input is the same on all, its results are added up.

    Args:
        block: `block(x, *weights)`, this worker's part of the block.
        axis_name: the mapped axis. All workers compute the same from the block's result, and the
            same loss. Without types (`check_vma=False`, `jax.pmap`, `jax.vmap`) take the gradient
            inside the mapped function.
        codec: the codec of the activations; None to send dense.
        back: the codec of their gradients; None for `codec`.

    Returns:
        `f(x, *weights, key=step, site=0)`.

    Raises:
        ValueError: as `jaxcomp.collectives.psum`, and for a gradient of `x` that is taken outside
            of a mapped function without types.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> mlp = tensor_parallel(lambda x, into, out: jax.nn.relu(x @ into) @ out, "model")
        >>> into, out = jnp.ones((2, 64, 32)), jnp.ones((2, 32, 64))
        >>> split = jax.vmap(lambda x, *w: mlp(x, *w, key=0), (None, 0, 0), axis_name="model")
        >>> jax.jit(split)(jnp.ones((8, 64)), into, out).shape
        (2, 8, 64)

    References:
        Shoeybi et al., `Megatron-LM <https://arxiv.org/abs/1909.08053>`_, 2019; Li et al., `Flash
        Communication <https://arxiv.org/abs/2412.04964>`_, 2024, for quantised activations.
    """

    def run(x: PyTree, *weights: PyTree, key: Any = None, site: Any = 0) -> PyTree:
        own = pvary(x, axis_name, codec if back is None else back, key=key, site=(site, "in"))
        add = functools.partial(psum, codec=codec, back=back, replicated=True)
        return add(block(own, *weights), axis_name, key=key, site=(site, "out"))

    return run


def experts(
    expert: Callable[..., Array],
    axis_name: AxisName,
    codec: "Codec | Policy | None" = MXFP8,
    *,
    combine: "Codec | Policy | None" = None,
) -> Callable[..., Array]:
    """Sends tokens to their experts and back, of which each worker has one or several.

    Args:
        expert: `expert(tokens, *weights)` with tokens `[workers · capacity, features]`, of all
            workers in their order; it keeps their number.
        axis_name: the mapped axis.
        codec: the codec of tokens on their way; None to send dense.
        combine: the codec on the way back; None to send dense, in the tokens' own dtype.

    Returns:
        `f(tokens, *weights, key=step, site=0)`; rows `[j · capacity, (j + 1) · capacity)` go to
        worker `j` and come back. Rows of zeros, which fill up a capacity, arrive as zeros.

    Raises:
        ValueError: as `jaxcomp.collectives.all_to_all`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> moe = experts(lambda tokens, w: tokens @ w, "experts")
        >>> run = jax.vmap(lambda x, w: moe(x, w, key=0), axis_name="experts")
        >>> jax.jit(run)(jnp.ones((2, 8, 64)), jnp.ones((2, 64, 64))).shape
        (2, 8, 64)

    References:
        DeepSeek-AI, `DeepSeek-V3 <https://arxiv.org/abs/2412.19437>`_, 2024, which sends tokens in
        8 bits with a scale for each 128 features, and combines in bfloat16.

    Note:
        Deviation: scales are powers of two for 32 features each, as in the mx formats.
    """

    def run(tokens: Array, *weights: PyTree, key: Any = None, site: Any = 0) -> Array:
        ways = {"axis_name": axis_name, "split_axis": 0, "concat_axis": 0, "key": key}
        move: Any = functools.partial(all_to_all, **ways)
        # Each way back has the codec of the other way.
        there = move(tokens, codec=codec, back=combine or Identity(), site=(site, "there"))
        answers = expert(there, *weights)
        return move(answers, codec=combine, back=codec or Identity(), site=(site, "back"))

    return run


def pipeline(
    stage: Callable[..., Array],
    axis_name: AxisName,
    codec: "Codec | Policy | None" = EIGHT,
    *,
    back: "Codec | Policy | None" = None,
) -> Callable[..., Array]:
    """Stages one after another on workers, through which microbatches pass: a GPipe schedule.

    Args:
        stage: `stage(x, *weights)`, which keeps the shape of its input.
        axis_name: the mapped axis of the stages.
        codec: the codec of the activations between stages; None to send dense.
        back: the codec of their gradients; None for `codec`.

    Returns:
        `f(batches, *weights, key=step, site=0)` with microbatches `[number, …]`, of which the first
        stage uses its own. The last stage returns the results `[number, …]`, all others zeros.

    Raises:
        ValueError: as `jaxcomp.collectives.ppermute`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> net = pipeline(lambda x, w: x + w, "stages")
        >>> run = jax.vmap(lambda x, w: net(x, w, key=0), axis_name="stages")
        >>> out = jax.jit(run)(jnp.zeros((2, 3, 4, 8)), jnp.ones(2))
        >>> out[1].mean().round(2), out[0].max()
        (Array(2., dtype=float32), Array(0., dtype=float32))

    References:
        Huang et al., `GPipe <https://arxiv.org/abs/1811.06965>`_, 2019. Changes of each sample's
        activations, as of Wang et al., `AQ-SGD <https://arxiv.org/abs/2206.01299>`_, 2022, are not
        sent: that needs a memory for each sample.
    """

    def run(batches: Array, *weights: PyTree, key: Any = None, site: Any = 0) -> Array:
        def step(x: Array) -> Array:
            return stage(x, *weights)

        return pass_on(step, batches, axis_name, codec, key=key, site=site, back=back)

    return run
