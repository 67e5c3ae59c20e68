"""DiLoCo and its relatives: local steps of a strong optimizer, and a momentum between rounds."""

import functools
import math
from typing import Any

import optax

from jaxcomp import checks
from jaxcomp.algorithms.types import Mean, Method, Rate
from jaxcomp.base import Codec
from jaxcomp.feedback import Aggregated, Link, Residual
from jaxcomp.layout.policy import Policy
from jaxcomp.misuse.whole_methods import whole
from jaxcomp.optimizers.muon import diloco_adamw, muon_by_shape
from jaxcomp.recipes.sparsifiers import demo
from jaxcomp.reducers.gather import Gather
from jaxcomp.transforms.fragments import Fragments
from jaxcomp.transforms.local_updates import local_updates
from jaxcomp.transforms.mean import compressed_mean
from jaxcomp.types import AxisName, PyTree

Inner = optax.GradientTransformation


@whole
def diloco(
    codec: Mean,
    axis_name: AxisName,
    *,
    every: int,
    inner: Inner | None = None,
    learning_rate: Rate = 0.7,
    momentum: float = 0.9,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """DiLoCo: rounds of AdamW, and Nesterov momentum on the mean of what the workers have moved.

    `Δ̄ = mean(φ − θᵢ)`, `v ← Δ̄ + β v`, `φ ← φ − η (Δ̄ + β v)`, `θᵢ ← φ`.

    Args:
        codec: the codec of the pseudo-gradients, or a reducer; the paper's is `jaxcomp.Dense()`.
        axis_name: the mapped axis of the workers.
        every: the steps of a round, 30 to 500.
        inner: the optimizer of the local steps, whose state is kept; None for
            `optax.adamw(4e-4, 0.9, 0.95, weight_decay=0.1)`.
        learning_rate: `η`, a number or an optax schedule of the rounds.
        momentum: `β`.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for a number of steps that is not positive.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.algorithms.diloco(jaxcomp.qsgd_inf(bits=4), "data", every=30)

    References:
        Douillard et al., `DiLoCo: distributed low-communication training of language models
        <https://arxiv.org/abs/2311.08105>`_, 2023.

    Note:
        Guarantee: none is published. Take the loss at `jaxcomp.view(params, state)`. The constants
        of AdamW are those of the open reproduction (OpenDiLoCo).
    """
    return local_updates(
        diloco_adamw() if inner is None else inner,
        optax.sgd(learning_rate, momentum, nesterov=True),
        axis_name,
        every=every,
        reducer=codec,
        key=key,
        param_specs=param_specs,
    )


@whole
def streaming_diloco(
    codec: Mean,
    axis_name: AxisName,
    *,
    every: int = 100,
    fragments: Fragments = 4,
    delay: int = 5,
    mix: float = 0.5,
    inner: Inner | None = None,
    learning_rate: Rate = 0.7,
    momentum: float = 0.9,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """Streaming DiLoCo: fragments of the model in turn, with a delay in which training goes on.

    Fragment `p` of `P` is taken `τ` steps before step `(p + 1) · every / P` of a round, and there
    moves the centre; then `θᵢ ← α θᵢ + (1 − α) φ` for its leaves.

    Args:
        codec: the codec of the pseudo-gradients; the paper's four bits, a sign and three bits of
            exponent, are `jaxcomp.natural_dithering(bits=4)`.
        axis_name: the mapped axis of the workers.
        every: the steps of a round, a multiple of the fragments.
        fragments: `P`, or a function from parameters to a tree of numbers, such as
            `jaxcomp.transforms.fragments.strided(4)`.
        delay: `τ`, below `every / P`.
        mix: `α`.
        inner: the optimizer of the local steps; None as for `diloco`.
        learning_rate: `η`, a number or an optax schedule of the rounds.
        momentum: `β`.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for fragments that do not divide a round, or a delay that is too long.

    Example:
        >>> import jaxcomp
        >>> codec = jaxcomp.natural_dithering(bits=4)
        >>> tx = jaxcomp.algorithms.streaming_diloco(codec, "data", every=100, fragments=4)

    References:
        Douillard et al., `Streaming DiLoCo with overlapping communication: towards a distributed
        free lunch <https://arxiv.org/abs/2501.18512>`_, 2025.

    Note:
        Guarantee: none is published. The paper rounds to the nearest code, this one at random
        without bias, with a scale for 512 elements. `every=100` and `mix=0.5` are from memory of
        the paper. `jaxcomp.Overlapped` runs the exchanges beside the steps; within one jitted step
        the compiler hides nothing of them beside the next one.
    """
    make = functools.partial(
        local_updates, every=every, reducer=codec, key=key, param_specs=param_specs
    )
    inner, outer = inner or diloco_adamw(), optax.sgd(learning_rate, momentum, nesterov=True)
    return make(inner, outer, axis_name, fragments=fragments, delay=delay, mix=mix)


@whole
def muloco(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    learning_rate: Rate,
    every: int = 30,
    outer_rate: Rate = 0.9,
    momentum: float = 0.8,
    decay: float = 0.9,
    inner: Inner | None = None,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """MuLoCo: DiLoCo with Muon as the inner optimizer, and a decaying residual of a few bits.

    `e ← 0.9 e + Δᵢ`, send `c = Q(e)`, `e ← e − c`.

    Args:
        codec: `Q`, of 2 to 8 bits, such as `jaxcomp.blockwise(bits=2)`.
        axis_name: the mapped axis of the workers.
        learning_rate: that of Muon; of AdamW for what is no matrix, too.
        every: the steps of a round.
        outer_rate: `η`, a number or an optax schedule of the rounds.
        momentum: `β`.
        decay: of the residual.
        inner: the optimizer of the local steps; None for Muon without Nesterov momentum (0.9), with
            the factor `√(out/in)`, AdamW (0.9, 0.99) for what is no matrix, and a weight decay of
            1e-4, as in the authors' code. It takes every matrix `[in, out]` for a hidden layer:
            for a model with embeddings and a head, give `optax.contrib.muon` with its
            `muon_weight_dimension_numbers`.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for a codec whose residual would grow.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.algorithms.muloco(jaxcomp.blockwise(bits=2), "data", learning_rate=0.02)

    References:
        Thérien et al., `MuLoCo: Muon is a practical inner optimizer for DiLoCo
        <https://arxiv.org/abs/2505.23725>`_, 2025.

    Note:
        Guarantee: none is published. Norms and biases are sent dense. The published code multiplies
        by the outer rate twice; this does not. It uses AdamW for embeddings and the head, and
        scales the decay with the number of steps and workers. Each worker decodes the messages of
        all: with two bits, compressing their mean a second time, as two shots do, cost 3 % of the
        loss.
    """
    return local_updates(
        muon_by_shape(learning_rate) if inner is None else inner,
        optax.sgd(outer_rate, momentum, nesterov=True),
        axis_name,
        every=every,
        reducer=Gather(Link(codec, Residual(decay))),
        key=key,
        param_specs=param_specs,
    )


@whole
def sparseloco(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    inner: Inner | None = None,
    every: int = 30,
    learning_rate: Rate = 1.0,
    decay: float = 0.95,
    over: str = "workers",
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """SparseLoCo: the largest elements of a decaying sum of pseudo-gradients, in two bits each.

    `e ← 0.95 e + Δᵢ`, send `c = Q(top-k(e))`, `e ← e − c`, `φ ← φ − η mean c`.

    Args:
        codec: `Q ∘ top-k`, such as `jaxcomp.chunk_top_k()`, 128 of 8,192 elements.
        axis_name: the mapped axis of the workers.
        inner: the optimizer of the local steps; None as for `diloco`.
        every: the steps of a round.
        learning_rate: `η`, a number or an optax schedule of the rounds.
        decay: of the residual, which replaces the outer momentum.
        over: "workers" divides by their number (the paper), "senders" by the number of workers that
            sent an element (the authors' code).
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for a codec whose residual would grow.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.algorithms.sparseloco(jaxcomp.chunk_top_k(), "data", every=30)

    References:
        Sarfi et al., `Communication efficient LLM pre-training with SparseLoCo
        <https://arxiv.org/abs/2508.15706>`_, 2025.

    Note:
        Guarantee: none is published. The paper has `e ← 0.95 e + η Δ`, which is the same for a
        constant `η`. The authors' code takes the largest of tiles of 64 × 64, codes values by
        uniform bins over ±3 standard deviations, decoded to the means of what is in them, and clips
        messages at their median norm; `jaxcomp.chunk_top_k` says what is done here, without clip.
    """
    return local_updates(
        diloco_adamw() if inner is None else inner,
        optax.sgd(learning_rate),
        axis_name,
        every=every,
        reducer=Gather(Link(codec, Residual(decay)), over=over),
        key=key,
        param_specs=param_specs,
    )


def demo_sgd(
    axis_name: AxisName,
    *,
    k: int = 32,
    chunk: int = 64,
    decay: float = 0.999,
    weight_decay: float = 0.0,
    subtract: str = "own",
    policy: Codec | Policy | None = None,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """DeMo: each worker sends the fast components of its own momentum, and keeps the slow ones.

    `m ← 0.999 m + g`, `c` the `k` largest of its cosine transform, `m ← m − c`; returns
    `sign(mean c) + λx`.

    Args:
        axis_name: the mapped axis of the workers.
        k: the coefficients that are sent of each square.
        chunk: the side of a square. Vectors and small leaves are cut into pieces of about `chunk`
            elements, of which `k` coefficients are sent, too.
        decay: of the momentum.
        weight_decay: `λ`.
        subtract: "own" subtracts what this worker has sent, as DeMo and DisTrO do; "aggregate" the
            mean of what all have sent, which no published method does.
        policy: a policy or codec in place of `k` and `chunk`, such as `jaxcomp.demo(values=...)`. A
            leaf that it sends dense keeps no momentum, since all of it is sent.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for coefficients or decays out of range, a policy beside `k` or `chunk`, or
            another subtraction.

    Example:
        >>> import jaxcomp, optax
        >>> signs = jaxcomp.algorithms.demo_sgd("data")
        >>> tx = optax.chain(signs, optax.scale_by_learning_rate(1e-3))

    References:
        Peng et al., `DeMo: decoupled momentum optimization <https://arxiv.org/abs/2411.19870>`_,
        2024; the code of Psyche, which trains by DisTrO, Nous Research, 2025.

    Note:
        Guarantee: none is published. The mean of a coefficient is over the workers that sent it.
        The momentum holds `g`, the paper's `γ g`, which is the same for a constant rate. The code
        cuts along each dimension, by the largest divisor up to 64, and transforms a vector by
        lines; here they are consecutive elements, padded, and squares of 8 × 8 for vectors.
    """
    checks.choice("subtract", subtract, ("own", "aggregate"))
    checks.number("weight_decay", weight_decay, 0.0)
    feedback = Residual(decay) if subtract == "own" else Aggregated(Residual(decay))
    mean = Gather(Link(_coefficients(policy, k, chunk), feedback), over="senders")
    return optax.chain(
        compressed_mean(mean, axis_name, key=key, param_specs=param_specs),
        optax.scale_by_sign(),
        optax.add_decayed_weights(weight_decay) if weight_decay else optax.identity(),
    )


def _coefficients(policy: Codec | Policy | None, k: int, chunk: int) -> Codec | Policy:
    """Which coefficients are sent: of squares, and of smaller ones for vectors and small leaves."""
    if policy is None:
        side = max(2, math.isqrt(chunk))
        return Policy(demo(k, chunk), rest=demo(min(k, side**2), side))
    if (k, chunk) != (32, 64):
        raise ValueError(
            f"`policy` must be None beside k={k} and chunk={chunk}, got {policy!r}; give these to "
            "the codec, as in jaxcomp.demo(k, chunk)"
        )
    return policy
