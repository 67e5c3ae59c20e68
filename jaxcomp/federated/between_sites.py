"""DiLoCo and its relatives between sites: the outer optimizer is the server's."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import optax

from jaxcomp import checks
from jaxcomp.base import Codec
from jaxcomp.federated.method import Method
from jaxcomp.federated.sides import GlobalModel
from jaxcomp.federated.uplink import Uplink, as_link
from jaxcomp.federated.work import LocalSteps, Loss
from jaxcomp.feedback import Link, Residual
from jaxcomp.layout.policy import NOTHING, Policy
from jaxcomp.optimizers.muon import diloco_adamw, muon_by_shape
from jaxcomp.transforms.fragments import Fragments
from jaxcomp.transforms.wrappers import widened

Inner = optax.GradientTransformation


def diloco(
    codec: Codec | Policy | Link | None,
    loss: Loss,
    *,
    inner: Inner | None = None,
    learning_rate: Any = 0.7,
    momentum: float = 0.9,
    down: Codec | Policy | Link | None = None,
) -> Method:
    """DiLoCo between sites: rounds of AdamW, and Nesterov momentum on the mean of what sites moved.

    `Δ̄ = mean(φ − θᵢ)`, `v ← Δ̄ + β v`, `φ ← φ − η (Δ̄ + β v)`, `θᵢ ← φ`.

    Args:
        codec: the codec of the pseudo-gradients, a policy or a link; None sends them dense.
        loss: `loss(params, batch)`, a scalar.
        inner: the optimizer of the local steps, whose state stays at the site; None for
            `optax.adamw(4e-4, 0.9, 0.95, weight_decay=0.1)`.
        learning_rate: `η`, a number or an optax schedule of the rounds.
        momentum: `β`.
        down: the codec of the server's steps; None sends the parameters.

    Raises:
        ValueError: for parts of another kind.

    Example:
        >>> import jax.numpy as jnp, jaxcomp
        >>> method = diloco(jaxcomp.qsgd_inf(bits=4), lambda w, x: jnp.mean((w - x) ** 2))

    References:
        Douillard et al., `DiLoCo: distributed low-communication training of language models
        <https://arxiv.org/abs/2311.08105>`_, 2023.

    Note:
        Guarantee: none is published. With all sites in every round it has the bits of
        `jaxcomp.algorithms.diloco` over the same workers, with `Gather`.
    """
    outer = optax.sgd(learning_rate, momentum, nesterov=True)
    link = as_link("codec", NOTHING if codec is None else codec)
    return Method(_kept(loss, inner or diloco_adamw()), link, server=widened(outer), down=down)


def streaming_diloco(
    codec: Codec | Policy | Link | None,
    loss: Loss,
    *,
    fragments: Fragments = 4,
    delay: int = 5,
    mix: float = 0.5,
    inner: Inner | None = None,
    learning_rate: Any = 0.7,
    momentum: float = 0.9,
    down: Codec | Policy | Link | None = None,
) -> Method:
    """Streaming DiLoCo between sites: a fragment in each round, and steps beside its exchange.

    In round n fragment `p = n mod P` is sent, `Δ̄ₚ = mean(φₚ − θᵢₚ)`, and Nesterov momentum moves
    `φₚ`; `delay` steps later `θᵢₚ ← α θᵢₚ + (1 − α) φₚ`.

    Args:
        codec: the codec of the pseudo-gradients, a policy or a link; None sends them dense. The
            paper's four bits are `jaxcomp.natural_dithering(bits=4)`.
        loss: `loss(params, batch)`, a scalar.
        fragments: `P`, or a function from parameters to a tree of numbers, such as
            `jaxcomp.transforms.fragments.strided(4)`. A round is a P-th of DiLoCo's.
        delay: `τ`, fewer than the steps of a round: those that a site takes while its message is
            under way.
        mix: `α`, below 1.
        inner: the optimizer of the local steps; None as for `diloco`.
        learning_rate: `η`, a number or an optax schedule of a fragment's exchanges.
        momentum: `β`.
        down: the codec of the server's steps; None sends the fragment's parameters.

    Raises:
        ValueError: for parts of another kind, or numbers out of range.

    Example:
        >>> import jax.numpy as jnp, jaxcomp
        >>> codec = jaxcomp.natural_dithering(bits=4)
        >>> method = streaming_diloco(codec, lambda w, x: jnp.mean((w - x) ** 2), fragments=1)

    References:
        Douillard et al., `Streaming DiLoCo with overlapping communication: towards a distributed
        free lunch <https://arxiv.org/abs/2501.18512>`_, 2025.

    Note:
        Guarantee: none is published. Deviations are those of
        `jaxcomp.algorithms.streaming_diloco`, whose bits it has with all sites in every round and
        `mix=0`; with a mix, a site knows the centre's step only as the difference of two centres,
        and differs by its rounding.
    """
    outer = widened(optax.sgd(learning_rate, momentum, nesterov=True))
    link = as_link("codec", NOTHING if codec is None else codec)
    method = Method(_kept(loss, inner or diloco_adamw()), link, server=outer, down=down)
    return dataclasses.replace(method, fragments=fragments, delay=delay, mix=mix)


def muloco(
    codec: Codec | Policy,
    loss: Loss,
    *,
    learning_rate: Any,
    outer_rate: Any = 0.9,
    momentum: float = 0.8,
    decay: float = 0.9,
    inner: Inner | None = None,
    down: Codec | Policy | Link | None = None,
) -> Method:
    """MuLoCo between sites: DiLoCo with Muon inside, and a decaying residual of a few bits.

    `e ← 0.9 e + Δᵢ`, send `c = Q(e)`, `e ← e − c`.

    Args:
        codec: `Q`, of 2 to 8 bits, such as `jaxcomp.blockwise(bits=2)`.
        loss: `loss(params, batch)`, a scalar.
        learning_rate: that of Muon; of AdamW for what is no matrix, too.
        outer_rate: `η`, a number or an optax schedule of the rounds.
        momentum: `β`.
        decay: of the residual.
        inner: the optimizer of the local steps; None as for `jaxcomp.algorithms.muloco`.
        down: the codec of the server's steps; None sends the parameters.

    Raises:
        ValueError: for a codec whose residual would grow, or parts of another kind.

    Example:
        >>> import jax.numpy as jnp, jaxcomp
        >>> method = muloco(
        ...     jaxcomp.blockwise(bits=2),
        ...     lambda w, x: jnp.mean((x @ w) ** 2),
        ...     learning_rate=0.02,
        ... )

    References:
        Thérien et al., `MuLoCo: Muon is a practical inner optimizer for DiLoCo
        <https://arxiv.org/abs/2505.23725>`_, 2025.

    Note:
        Guarantee: none is published. Deviations are those of `jaxcomp.algorithms.muloco`, whose
        bits it has with all sites in every round.
    """
    work = _kept(loss, muon_by_shape(learning_rate) if inner is None else inner)
    outer = optax.sgd(outer_rate, momentum, nesterov=True)
    return Method(work, Link(codec, Residual(decay)), server=widened(outer), down=down)


def sparseloco(
    codec: Codec | Policy,
    loss: Loss,
    *,
    inner: Inner | None = None,
    learning_rate: Any = 1.0,
    decay: float = 0.95,
    over: str = "workers",
    down: Codec | Policy | Link | None = None,
) -> Method:
    """SparseLoCo between sites: the largest of a decaying sum of pseudo-gradients, in two bits.

    `e ← 0.95 e + Δᵢ`, send `c = Q(top-k(e))`, `e ← e − c`, `φ ← φ − η mean c`.

    Args:
        codec: `Q ∘ top-k`, such as `jaxcomp.chunk_top_k()`, 128 of 8,192 elements.
        loss: `loss(params, batch)`, a scalar.
        inner: the optimizer of the local steps; None as for `diloco`.
        learning_rate: `η`, a number or an optax schedule of the rounds.
        decay: of the residual, which replaces the outer momentum.
        over: "workers" divides by the weight of all messages (the paper), "senders" by that of the
            messages with an element (the authors' code).
        down: the codec of the server's steps; None sends the parameters.

    Raises:
        ValueError: for a codec whose residual would grow, or parts of another kind.

    Example:
        >>> import jax.numpy as jnp, jaxcomp
        >>> method = sparseloco(jaxcomp.chunk_top_k(), lambda w, x: jnp.mean((w - x) ** 2))

    References:
        Sarfi et al., `Communication efficient LLM pre-training with SparseLoCo
        <https://arxiv.org/abs/2508.15706>`_, 2025.

    Note:
        Guarantee: none is published. Deviations are those of `jaxcomp.algorithms.sparseloco`, whose
        bits it has with all sites in every round and `over="workers"`. With "senders", an element
        that is sent as zero counts as not sent.
    """
    checks.choice("over", over, ("workers", "senders"))
    mean = "participants" if over == "workers" else "senders"
    work, link = _kept(loss, inner or diloco_adamw()), Link(codec, Residual(decay))
    return Method(work, link, server=widened(optax.sgd(learning_rate)), down=down, mean=mean)


def pulseloco(
    codec: Codec | Policy | Link,
    loss: Loss,
    *,
    inner: Inner | None = None,
    learning_rate: Any = 0.7,
    momentum: float = 0.9,
    down: Codec | Policy | Link | None = None,
) -> Method:
    """PULSELoCo between sites: DiLoCo that sends what changes parameters in bfloat16.

    `u = e + (φ − θᵢ)`, send the entries of `u` with `bf16(φ − u) ≠ bf16(φ)`; the others stay in
    `e`. The outer step is that of `diloco`.

    Args:
        codec: the codec of visible changes, such as `jaxcomp.visible(fraction=0.1)`, a policy of
            such codecs or a link; the default feedback is `Residual()`.
        loss: `loss(params, batch)`, a scalar.
        inner: the optimizer of the local steps; None as for `diloco`.
        learning_rate: `η`, a number or an optax schedule of the rounds.
        momentum: `β`.
        down: the codec of the server's steps; None sends the parameters.

    Raises:
        ValueError: for a codec that is not guided by the parameters, or parts of another kind.

    Example:
        >>> import jax.numpy as jnp, jaxcomp
        >>> method = pulseloco(jaxcomp.visible(fraction=0.1), lambda w, x: jnp.mean((w - x) ** 2))

    References:
        Miahi and Belilovsky, `Understanding and exploiting weight update sparsity for
        communication-efficient distributed RL <https://arxiv.org/abs/2602.03839>`_, 2026. We have
        read the abstract and a description of the method.

    Note:
        Guarantee: none is published. Where every change is visible it has the bits of `diloco`. It
        is for learning rates of reinforcement learning on parameters in float32: at 1e-3 most
        changes are visible. Visible means by the site's own update at an outer rate of 1 without
        momentum; after another rate, and the mean over sites, fewer or more values change. A
        payload has the capacity of its codec, and what does not fit stays in `e` as well. Small
        leaves are sent dense, as by every codec without a policy.
    """
    up, outer = as_link("codec", codec), optax.sgd(learning_rate, momentum, nesterov=True)
    work, side = _kept(loss, inner or diloco_adamw()), GlobalModel()
    return Method(work, Uplink(up, side), server=widened(outer), down=down)


def tokens_squared_per_step(reported: Mapping[str, Any]) -> float:
    """The weight of a site that reports "tokens" and "steps": `tokens² / steps`, zero without any.

    At equal tokens in each step it is proportional to the number of steps.

    Args:
        reported: the numbers that the site reports since its last accepted message.

    Raises:
        ValueError: if one of both numbers is missing, negative or not finite.

    Example:
        >>> tokens_squared_per_step({"tokens": 4096, "steps": 4})
        4194304.0

    References:
        Douillard et al., `Decoupled DiLoCo for resilient distributed pre-training
        <https://arxiv.org/abs/2604.21428>`_, 2026. We have read the abstract, and the formula in
        code that quotes the paper.
    """
    for name in ("tokens", "steps"):
        if name not in reported:
            raise ValueError(f"`reported` must have the number {name!r}, got {sorted(reported)}")
        checks.number(f"reported[{name!r}]", reported[name], 0.0)
    tokens, steps = float(reported["tokens"]), float(reported["steps"])
    return tokens * (tokens / steps) if steps else 0.0


def _kept(loss: Loss, inner: Inner) -> LocalSteps:
    """Local steps as those of `local_updates`."""
    return LocalSteps(loss, inner, keep=True, offsets=True)
