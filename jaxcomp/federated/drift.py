"""Methods against the drift of clients whose data differ: FedProx and SCAFFOLD."""

from typing import Any

import jax
import optax

from jaxcomp import checks
from jaxcomp.backend import xla
from jaxcomp.base import Codec
from jaxcomp.federated.method import Method
from jaxcomp.federated.sampling import participants_of
from jaxcomp.federated.uplink import as_link
from jaxcomp.federated.work import LocalSteps, Loss
from jaxcomp.feedback import Link
from jaxcomp.layout.policy import NOTHING, Policy
from jaxcomp.numerics import addition
from jaxcomp.types import PyTree


def proximal(mu: float) -> optax.GradientTransformationExtraArgs:
    """Adds the gradient of FedProx's proximal term, `μ (θ − φ)`, before a client's optimizer.

    Args:
        mu: `μ`, at least 0: the weight of `‖θ − φ‖²/2` in the local loss, where `φ` is where the
            client's round begins.

    Raises:
        ValueError: for a negative `mu`; on use, outside of `LocalSteps`, which says where the round
            began.

    Example:
        >>> import jax.numpy as jnp
        >>> optimizer = optax.chain(proximal(0.1), optax.adam(1e-3))
        >>> work = LocalSteps(lambda w, x: jnp.mean((w - x) ** 2), optimizer, keep=True)

    References:
        Li et al., `Federated optimization in heterogeneous networks
        <https://arxiv.org/abs/1812.06127>`_ (FedProx), 2020.

    Note:
        It has no state: with `keep=True`, too, `φ` is that of the round.
    """
    checks.number("mu", mu, 0.0)

    def update_fn(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        start: PyTree | None = None,
        **extra: Any,
    ) -> tuple[PyTree, Any]:
        del extra
        if params is None or start is None:
            raise ValueError(
                "`start` must be the parameters from which a round began, which "
                "jaxcomp.federated.LocalSteps gives its optimizer, got None"
            )

        def pull(g: Any, at: Any, begin: Any) -> Any:
            wide = addition.wide(g.dtype)
            pulled = xla.block_fma(mu * (at.astype(wide) - begin.astype(wide)))
            return (g.astype(wide) + pulled).astype(g.dtype)

        return jax.tree.map(pull, updates, params, start), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)


def fedprox(
    codec: Codec | Policy | Link | None,
    loss: Loss,
    *,
    learning_rate: Any,
    mu: float,
    participants: int | None = None,
    down: Codec | Policy | Link | None = None,
) -> Method:
    """FedProx: federated averaging whose clients are held near the global model.

    `θᵢ ← φ`, then `θᵢ ← θᵢ − γ (∇fᵢ(θᵢ) + μ (θᵢ − φ))` for each batch;
    `φ ← φ + Σ wᵢ·(θᵢ − φ) / Σ wᵢ`.

    Args:
        codec: the codec of the differences, a policy or a link; None sends them dense.
        loss: `loss(params, batch)`, a scalar.
        learning_rate: `γ`, a number or an optax schedule of the steps of a round, from 0 in each.
        mu: `μ`, at least 0; with 0 it is `fedavg`. The paper takes 0.001 to 1.
        participants: how many clients take part in a round, drawn anew each time; None for all.
        down: the codec of the server's steps; None sends the parameters.

    Raises:
        ValueError: for a negative `mu`, parts of another kind, or a number of participants that is
            not positive; on use, if there are fewer clients.

    Example:
        >>> import jax.numpy as jnp, jaxcomp
        >>> method = fedprox(
        ...     jaxcomp.qsgd_inf(bits=4),
        ...     lambda w, x: jnp.mean((w - x) ** 2),
        ...     learning_rate=0.1,
        ...     mu=0.01,
        ... )

    References:
        Li et al., `Federated optimization in heterogeneous networks
        <https://arxiv.org/abs/1812.06127>`_ (FedProx), 2020.

    Note:
        Guarantee: the paper's, for dense messages and local problems that are solved to a given
        accuracy. Its clients that do less work are those of `Simulation(steps=…)`. It draws clients
        by their weights and averages them alike; here draws are alike and means weighted.
    """
    checks.rate(learning_rate)
    work = LocalSteps(loss, optax.chain(proximal(mu), optax.sgd(learning_rate)))
    link = as_link("codec", NOTHING if codec is None else codec)
    return Method(work, link, down=down, sampling=participants_of(participants))


def scaffold(
    codec: Codec | Policy | Link | None,
    loss: Loss,
    *,
    learning_rate: Any,
    server_rate: Any = 1.0,
    participants: int | None = None,
    down: Codec | Policy | Link | None = None,
) -> Method:
    """SCAFFOLD: control variates correct the local steps of clients whose data differ.

    `θᵢ ← φ`, then `θᵢ ← θᵢ − γ (g − cᵢ + c)` for each batch; a client sends `θᵢ − φ` and `ḡᵢ − cᵢ`,
    where `ḡᵢ` is the mean of its gradients, `cᵢ ← ḡᵢ`, and with `W` the weight of all clients
    `φ ← φ + η Σ wᵢ·(θᵢ − φ) / Σ wᵢ`, `c ← c + Σ wᵢ·(ḡᵢ − cᵢ) / W` over the participants.

    Args:
        codec: the codec of both differences, a policy or a link; None sends them dense.
        loss: `loss(params, batch)`, a scalar of the model's parameters.
        learning_rate: `γ`, a number or an optax schedule of the steps of a round, from 0 in each.
        server_rate: `η`, a number or an optax schedule of the rounds.
        participants: how many clients take part in a round, drawn anew each time; None for all.
        down: the codec of the server's steps of parameters and control variate; None sends both.

    Raises:
        ValueError: for parts of another kind, a codec whose error exceeds its input, or a number of
            participants that is not positive; on use, if there are fewer clients, or for parameters
            without a control variate.

    Example:
        >>> import jax.numpy as jnp, jaxcomp
        >>> from jaxcomp import federated
        >>> method = scaffold(
        ...     jaxcomp.Policy(jaxcomp.qsgd_inf(bits=8), min_size=0, min_ndim=0),
        ...     lambda w, x: jnp.mean((w - x) ** 2),
        ...     learning_rate=0.1,
        ... )
        >>> params = federated.add_control(jnp.zeros(16))
        >>> data = jnp.ones((4, 2, 3, 16))
        >>> sim = federated.Simulation(method, params, 4, lambda numbers, round: data[numbers])
        >>> _ = sim.run(2)
        >>> sim.params.params.shape
        (16,)

    References:
        Karimireddy et al., `SCAFFOLD: stochastic controlled averaging for federated learning
        <https://arxiv.org/abs/1910.06378>`_, 2020, option II. Huang, Li and Li, `Stochastic
        controlled averaging for federated learning with communication compression
        <https://arxiv.org/abs/2308.08165>`_ (SCALLION, SCAFCOM), 2024, compress it.

    Note:
        Guarantee: the paper's, with dense messages. With others, none is known for this form:
        `cᵢ` moves by what the server has accepted of `ḡᵢ − cᵢ`, as the server decodes it, so that
        `c` is the mean of all `cᵢ` whatever is lost, absent or compressed. A residual holds back a
        part of `θᵢ − φ` alone: for `cᵢ` it would count twice. The paper's
        `cᵢ − c + (φ − θᵢ)/(Kγ)` is `ḡᵢ` for a constant rate. Control variates are at least in
        float32; each message and the server's state have twice the parameters.
    """
    checks.rate(learning_rate)
    work = LocalSteps(loss, optax.sgd(learning_rate), control=True)
    link = as_link("codec", NOTHING if codec is None else codec)
    server, sampling = optax.sgd(server_rate), participants_of(participants)
    return Method(work, link, server=server, down=down, sampling=sampling)
