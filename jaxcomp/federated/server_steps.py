"""Methods by the server's step: FedAdam, FedYogi and FedBuff."""

from typing import Any

import optax

from jaxcomp.base import Codec
from jaxcomp.federated.method import Method
from jaxcomp.federated.sampling import participants_of
from jaxcomp.federated.uplink import as_link
from jaxcomp.federated.work import Loss, descent
from jaxcomp.feedback import Link
from jaxcomp.layout.policy import NOTHING, Policy
from jaxcomp.optimizers.adaptive import adaptive_server


def fedadam(
    codec: Codec | Policy | Link | None,
    loss: Loss,
    *,
    learning_rate: Any,
    server_rate: Any,
    b1: float = 0.9,
    b2: float = 0.99,
    tau: float = 1e-3,
    participants: int | None = None,
    down: Codec | Policy | Link | None = None,
) -> Method:
    """FedAdam: clients take local steps of SGD, and the server steps by Adam on their mean.

    `Δ = Σ wᵢ·(φ − θᵢ) / Σ wᵢ`, `m ← β₁ m + (1 − β₁) Δ`, `v ← β₂ v + (1 − β₂) Δ²`,
    `φ ← φ − η m / (√v + τ)`.

    Args:
        codec: the codec of the differences, a policy or a link; None sends them dense.
        loss: `loss(params, batch)`, a scalar.
        learning_rate: `γ` of the clients, a number or an optax schedule of the steps of a round.
        server_rate: `η`, a number or an optax schedule of the rounds.
        b1: `β₁`.
        b2: `β₂`.
        tau: `τ`, in the units of the parameters' steps; `v` begins with `τ²`.
        participants: how many clients take part in a round, drawn anew each time; None for all.
        down: the codec of the server's steps; None sends the parameters.

    Raises:
        ValueError: for parts of another kind, numbers out of range, or a number of participants
            that is not positive; on use, if there are fewer clients.

    Example:
        >>> import jax.numpy as jnp, jaxcomp
        >>> method = fedadam(
        ...     jaxcomp.qsgd_inf(bits=4),
        ...     lambda w, x: jnp.mean((w - x) ** 2),
        ...     learning_rate=0.1,
        ...     server_rate=0.01,
        ... )

    References:
        Reddi et al., `Adaptive federated optimization <https://arxiv.org/abs/2003.00295>`_, 2021.

    Note:
        Guarantee: the paper's, with dense messages and unbiased draws of the clients.
        `Method(server=jaxcomp.optimizers.adaptive_server(rate, "adagrad", b1=0.0))` is FedAdagrad,
        and `Method(server=optax.sgd(rate, momentum))` is FedAvgM.
    """
    server = adaptive_server(server_rate, "adam", b1=b1, b2=b2, tau=tau)
    return _method(codec, loss, learning_rate, server, participants, down)


def fedyogi(
    codec: Codec | Policy | Link | None,
    loss: Loss,
    *,
    learning_rate: Any,
    server_rate: Any,
    b1: float = 0.9,
    b2: float = 0.99,
    tau: float = 1e-3,
    participants: int | None = None,
    down: Codec | Policy | Link | None = None,
) -> Method:
    """FedYogi: FedAdam whose second moment moves by at most `(1 − β₂) Δ²` in a round.

    As `fedadam`, with `v ← v − (1 − β₂) Δ² sign(v − Δ²)`.

    Args:
        codec: the codec of the differences, a policy or a link; None sends them dense.
        loss: `loss(params, batch)`, a scalar.
        learning_rate: `γ` of the clients, a number or an optax schedule of the steps of a round.
        server_rate: `η`, a number or an optax schedule of the rounds.
        b1: `β₁`.
        b2: `β₂`.
        tau: `τ`, in the units of the parameters' steps; `v` begins with `τ²`.
        participants: how many clients take part in a round, drawn anew each time; None for all.
        down: the codec of the server's steps; None sends the parameters.

    Raises:
        ValueError: as `fedadam`.

    Example:
        >>> import jax.numpy as jnp
        >>> method = fedyogi(
        ...     None, lambda w, x: jnp.mean((w - x) ** 2), learning_rate=0.1, server_rate=0.01
        ... )

    References:
        Reddi et al., `Adaptive federated optimization <https://arxiv.org/abs/2003.00295>`_, 2021.

    Note:
        Guarantee: as `fedadam`.
    """
    server = adaptive_server(server_rate, "yogi", b1=b1, b2=b2, tau=tau)
    return _method(codec, loss, learning_rate, server, participants, down)


def fedbuff(
    codec: Codec | Policy | Link | None,
    loss: Loss,
    *,
    learning_rate: Any,
    server_rate: Any = 1.0,
    staleness: float = 0.5,
    down: Codec | Policy | Link | None = None,
) -> Method:
    """FedBuff: the server steps whenever a buffer of `K` messages is full, late ones count less.

    `φ ← φ + η (1/K) Σ (1 + aᵢ)^(−p)·(θᵢ − φᵢ)` over the messages of the buffer, of clients that
    began from the parameters `φᵢ` of `aᵢ` steps ago.

    `K` is not the method's: over Flower it is that of
    `Quorum(messages=K, deadline=…, buffer=True)`, and in a `Simulation` as many messages are in a
    round as its `delays` let arrive.

    Args:
        codec: the codec of the differences, a policy or a link; None sends them dense.
        loss: `loss(params, batch)`, a scalar.
        learning_rate: `γ`, a number or an optax schedule of the steps of a round, from 0 in each.
        server_rate: `η`, a number or an optax schedule of the server's steps.
        staleness: `p`; the paper takes 1/2.
        down: the codec of the server's steps; None sends the parameters.

    Raises:
        ValueError: for parts of another kind, or a negative `staleness`.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from jaxcomp import federated
        >>> method = fedbuff(None, lambda w, x: jnp.mean((w - x) ** 2), learning_rate=0.1)
        >>> slow, data = np.array([0, 0, 0, 2]), np.ones((4, 2, 3, 16), np.float32)
        >>> sim = federated.Simulation(
        ...     method,
        ...     jnp.zeros(16),
        ...     4,
        ...     lambda numbers, round: data[numbers],
        ...     delays=lambda numbers, round: slow[numbers],
        ...     faults=federated.Faults(longest=2),
        ... )
        >>> [report.accepted for report in sim.run(4)]
        [3, 3, 4, 3]

    References:
        Nguyen et al., `Federated learning with buffered asynchronous aggregation
        <https://arxiv.org/abs/2106.06639>`_ (FedBuff), 2022.

    Note:
        Guarantee: the paper's, with dense messages, bounded ages and clients that arrive alike. A
        client that has answered is asked again when the next buffer begins, which has the same
        parameters; the paper's begins at once. Weights that differ count in the sum, which is
        divided by `K` times the mean weight of all clients.
    """
    return Method(
        descent(loss, learning_rate),
        as_link("codec", NOTHING if codec is None else codec),
        server=optax.sgd(server_rate),
        down=down,
        mean="messages",
        staleness=staleness,
    )


def _method(
    codec: Codec | Policy | Link | None,
    loss: Loss,
    learning_rate: Any,
    server: optax.GradientTransformation,
    participants: int | None,
    down: Codec | Policy | Link | None,
) -> Method:
    """Federated averaging with another step of the server."""
    link = as_link("codec", NOTHING if codec is None else codec)
    work, sampling = descent(loss, learning_rate), participants_of(participants)
    return Method(work, link, server=server, down=down, sampling=sampling)
