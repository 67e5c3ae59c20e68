"""Federated methods by their names in the literature: each is one `Method`."""

from typing import Any

import optax

from jaxcomp import checks
from jaxcomp.aggregates import Mean
from jaxcomp.base import Aggregate, Codec
from jaxcomp.codecs.best_of import BestOf
from jaxcomp.codecs.votes import Votes
from jaxcomp.federated.latent import Latent
from jaxcomp.federated.method import Method
from jaxcomp.federated.predictors import Predictors
from jaxcomp.federated.sampling import participants_of
from jaxcomp.federated.uplink import Uplink
from jaxcomp.federated.work import LocalSteps, Loss, descent
from jaxcomp.feedback import Link
from jaxcomp.layout.policy import Policy
from jaxcomp.recipes.quantizers import sign
from jaxcomp.recipes.sparsifiers import top_k
from jaxcomp.recipes.unbiased_links import unbiased_link, unbiased_links
from jaxcomp.sparsify.indices import RiceGaps

Rate = Any
"""A learning rate: a number, or an optax schedule of the steps of a round."""


def fedavg(loss: Loss, *, learning_rate: Rate, participants: int | None = None) -> Method:
    """Federated averaging: clients take local steps of SGD, and the server averages their models.

    `θᵢ ← φ`, then `θᵢ ← θᵢ − γ·gᵢ` for each batch; `φ ← φ + Σ wᵢ·(θᵢ − φ) / Σ wᵢ` over the
    participants.

    Args:
        loss: `loss(params, batch)`, a scalar.
        learning_rate: `γ`, a number or an optax schedule of the steps of a round, from 0 in each.
        participants: how many clients take part in a round, drawn anew each time; None for all.

    Raises:
        ValueError: for a number of participants that is not positive; on use, if there are fewer
            clients.

    Example:
        >>> import jax.numpy as jnp
        >>> method = fedavg(lambda w, x: jnp.mean((w - x) ** 2), learning_rate=0.1, participants=10)

    References:
        McMahan et al., `Communication-efficient learning of deep networks from decentralized data
        <https://arxiv.org/abs/1602.05629>`_, 2017.

    Note:
        Weights are the Simulation's: the paper's are the clients' numbers of examples. The mean is
        over the participants, as in the authors' later versions; the first one gives absent clients
        the old parameters.
    """
    work = descent(loss, learning_rate)
    return Method(work, Policy(None), sampling=participants_of(participants))


def fedpaq(
    codec: Codec | Policy | Link,
    loss: Loss,
    *,
    learning_rate: Rate,
    participants: int | None = None,
) -> Method:
    """FedPAQ: some clients take local steps of SGD and send the quantised difference.

    `φ ← φ + (1/r) Σ_{i∈S} Q(θᵢ − φ)` with `|S| = r`, after the local steps from `θᵢ = φ`.

    Args:
        codec: `Q`, an unbiased codec, such as `jaxcomp.qsgd(bits=2)`; or a `Link`, for a biased
            codec with feedback.
        loss: `loss(params, batch)`, a scalar.
        learning_rate: a number or an optax schedule of the steps of a round, from 0 in each.
        participants: `r`, drawn anew for each round; None for all clients.

    Raises:
        ValueError: for a biased codec, or a number of participants that is not positive; on use, if
            there are fewer clients.

    Example:
        >>> import jax.numpy as jnp, jaxcomp
        >>> method = fedpaq(
        ...     jaxcomp.qsgd(bits=2),
        ...     lambda w, x: jnp.mean((w - x) ** 2),
        ...     learning_rate=0.1,
        ...     participants=10,
        ... )

    References:
        Reisizadeh et al., `FedPAQ: a communication-efficient federated learning method with
        periodic averaging and quantization <https://arxiv.org/abs/1909.13014>`_, 2020.

    Note:
        Guarantee: for strongly convex losses `O(τ/T)` with decreasing rates, for smooth ones
        `O(1/√T)` with `τ` up to about `√T`, for clients whose data have the same distribution. The
        paper's rates depend on the number of the round as well; these only on the local step.
        Small and one-dimensional leaves are sent dense, unless `codec` is a policy that says
        otherwise.
    """
    work = descent(loss, learning_rate)
    return Method(work, unbiased_link("codec", codec), sampling=participants_of(participants))


def genqsgd(
    codec: Codec | Policy | Link,
    loss: Loss,
    *,
    learning_rate: Rate,
    down: Codec | Policy | Link | None = None,
) -> Method:
    """GenQSGD: clients take numbers of steps of their own, and both directions are quantised.

    `φ ← φ + Q₀(mean Qᵢ(θᵢ − φ))`, after `Kᵢ` steps from `θᵢ = φ`. The `steps` of the Simulation
    are `Kᵢ`.

    Args:
        codec: `Qᵢ`, an unbiased codec, the same for all clients; or a `Link`, for a biased codec
            with feedback.
        loss: `loss(params, batch)`, a scalar.
        learning_rate: a number or an optax schedule of the steps of a round, from 0 in each.
        down: `Q₀`, of the same kinds; None for `codec`.

    Raises:
        ValueError: for a biased codec.

    Example:
        >>> import jax.numpy as jnp, jaxcomp
        >>> method = genqsgd(
        ...     jaxcomp.qsgd(bits=4), lambda w, x: jnp.mean((w - x) ** 2), learning_rate=0.1
        ... )

    References:
        Li, Cui and Lau, `Optimization-based GenQSGD for federated edge learning
        <https://arxiv.org/abs/2111.00526>`_, 2021.

    Note:
        Guarantee: for smooth losses, the bound that `jaxcomp.planning.plan_genqsgd` minimises cost
        under. In the paper each client may have a quantiser of its own. Whether the paper divides a
        difference by the learning rate before it is quantised could not be read; these quantisers
        scale with their input, so it makes no difference.
    """
    up, back = unbiased_links(codec, down)
    return Method(descent(loss, learning_rate), up, down=back)


def stc(
    loss: Loss,
    *,
    learning_rate: Rate,
    fraction: int | float = 0.01,
    participants: int | None = None,
) -> Method:
    """Sparse ternary compression: the largest elements as one magnitude and signs, both ways.

    `C(x)` is `±μ` at the `k = ⌈fraction · n⌉` largest elements of a leaf, with `μ` their mean
    magnitude, and zero elsewhere. `cᵢ = C(θᵢ − φ + eᵢ)`, `eᵢ ← θᵢ − φ + eᵢ − cᵢ` on a client, and
    `d = C(mean cᵢ + e)`, `e ← mean cᵢ + e − d`, `φ ← φ + d` on the server.

    Args:
        loss: `loss(params, batch)`, a scalar.
        learning_rate: a number or an optax schedule of the steps of a round, from 0 in each.
        fraction: of the elements that are sent, in (0, 1], the same both ways; the paper takes 1/25
            to 1/400.
        participants: how many clients take part in a round, drawn anew each time; None for all.

    Raises:
        ValueError: for a fraction outside (0, 1], or a number of participants that is not positive;
            on use, if there are fewer clients.

    Example:
        >>> import jax.numpy as jnp
        >>> method = stc(lambda w, x: jnp.mean((w - x) ** 2), learning_rate=0.1, fraction=1 / 400)

    References:
        Sattler, Wiedemann, Müller and Samek, `Robust and communication-efficient federated learning
        from non-IID data <https://arxiv.org/abs/1903.02891>`_, 2019.

    Note:
        Guarantee: none is known for both residuals together with local steps. The paper takes the
        largest elements of the whole model and one magnitude for it; here each leaf has its own,
        and small and one-dimensional leaves are sent dense. Positions are Rice codes, in place of
        Golomb codes, and have the size of the worst case in arrays; `to_bytes` removes what is not
        used. A client that missed rounds downloads what it missed, as in the paper.
    """
    codec = top_k(fraction, values=sign(bucket_size=None), indices=RiceGaps())
    work = descent(loss, learning_rate)
    return Method(work, codec, down=codec, sampling=participants_of(participants))


def fedvote(
    loss: Latent,
    *,
    optimizer: optax.GradientTransformation | None = None,
    values: int = 2,
    participants: int | None = None,
    aggregate: Aggregate = Mean(),
) -> Method:
    """FedVote: clients send random binary or ternary votes for each weight, one bit an element.

    After its local steps, client i votes `P(vᵢ = +1) = (1 + tanh(k·θᵢ))/2` (binary), or sends the
    sign of `tanh(k·θᵢ)` with its magnitude as the probability, else 0 (ternary). The server inverts
    the mean of the votes: `φ ← artanh(Σ wᵢ·vᵢ / Σ wᵢ) / k`.

    Args:
        loss: the loss of the latent parameters.
        optimizer: of the local steps, new in every round; None for `optax.adam(0.01)`.
        values: 2 for binary votes, 3 for ternary ones, of 1.6 bits.
        participants: how many clients take part in a round, drawn anew each time; None for all.
        aggregate: how the votes are combined: `jaxcomp.aggregates.Credible()` leaves out clients
            that contradict clear majorities; `Credible(rule="soft")` has the paper's weights by
            reputation, and `Credible(rule="hard", trusted=...)` is that of the authors' code.

    Raises:
        ValueError: for a loss that is not a `Latent`, another number of values, or a number of
            participants that is not positive; on use, if there are fewer clients.

    Example:
        >>> import jax.numpy as jnp
        >>> method = fedvote(Latent(lambda w, x: jnp.mean((x @ w - 1) ** 2)))

    References:
        Yue, Jin, Wong and Dai, `Federated learning via plurality vote
        <https://arxiv.org/abs/2110.02998>`_ (FedVote), 2021.

    Note:
        Guarantee: the mean of the votes is an unbiased estimate of the mean of the forward weights;
        the map back to latent parameters is not linear, so these are not averaged. The authors'
        ternary code is broken, so it is reconstructed. Leaves that are not latent are averaged as
        in `fedavg`; with `Credible()`, by the reputation of the votes.
    """
    checks.part("loss", loss, Latent)
    work = LocalSteps(loss, optax.adam(0.01) if optimizer is None else optimizer)
    return Method(
        work,
        Link(loss.policy(Votes(values=values))),
        server=loss.inverse(),
        sampling=participants_of(participants),
        aggregate=aggregate,
        signal=loss.signal,
    )


def predictive_coding(
    loss: Loss,
    *,
    optimizer: optax.GradientTransformation | None = None,
    rate: float = 0.1,
    predictors: Predictors = Predictors(),
    bucket_size: int | None = None,
    participants: int | None = None,
) -> Method:
    """Predictive coding: clients send what predictors do not know of their updates, in few symbols.

    For each leaf a client takes the predictor and the ternary quantizer of the smallest
    `RMSE + rate · entropy`, and sends which, a scale and the symbols. The server adds the
    prediction, averages, and all predictors learn from the step that it takes.

    Args:
        loss: `loss(params, batch)`, a scalar.
        optimizer: of the local steps, new in every round; None for `optax.adam(5e-4)`.
        rate: `λ`, the error that a bit an element is worth, in units of the parameters.
        predictors: the guesses that server and clients share.
        bucket_size: elements that share a predictor and a quantizer; None for those of a leaf.
        participants: how many clients take part in a round, drawn anew each time; None for all.

    Raises:
        ValueError: for a negative rate, or a number of participants that is not positive; on use,
            if there are fewer clients.

    Example:
        >>> import jax.numpy as jnp
        >>> method = predictive_coding(lambda w, x: jnp.mean((w - x) ** 2), rate=0.1)

    References:
        Yue, Jin, Wong and Dai, `Communication-efficient federated learning via predictive coding
        <https://arxiv.org/abs/2108.00918>`_, 2022.

    Note:
        Guarantee: the mean is unbiased, whatever is predicted. Payloads have fixed width, 1.6 bits
        an element; only `to_bytes` (`messages` of the Simulation) has the length of the
        entropy. Leaves of fewer than 64 elements are sent dense, where a message of their own would
        be longer.
    """
    codec = Policy(BestOf(rate=rate, bucket_size=bucket_size), min_size=64, min_ndim=0)
    work = LocalSteps(loss, optax.adam(5e-4) if optimizer is None else optimizer)
    return Method(work, Uplink(codec, predictors), sampling=participants_of(participants))
