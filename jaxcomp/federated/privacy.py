"""Differential privacy of a method whose server clips its clients' messages and adds noise."""

import importlib
import math
from typing import Any, NamedTuple

from jaxcomp import checks
from jaxcomp.aggregates import ClippedMean
from jaxcomp.federated.method import Method
from jaxcomp.federated.sampling import Everyone, Exactly, Independently


class Privacy(NamedTuple):
    """The guarantee of a training, and the noise that it needs.

    Attributes:
        epsilon: `ε`; infinite without noise.
        deviation: the standard deviation of the noise of each element of the mean: the `√η` of
            `optax.add_noise(η, 0.0, key=key)`, which comes first among the server's steps.
        relation: the data sets that the guarantee compares: those in which one client is
            "replaced" by another, or is "added or removed".
    """

    epsilon: float
    deviation: float
    relation: str


def account_privacy(
    method: Method, clients: int, *, noise: float, rounds: int, delta: float
) -> Privacy:
    """The `ε` of clients' data towards who sees every round's parameters, by `dp-accounting`.

    One client moves the mean by at most `s`, and the server adds noise of deviation `noise · s`:
    `s = 2C/r` with `ClippedMean(C)` if one of the clients of `Everyone()` or `Exactly(r)` is
    replaced, and `s = C/(p·n)` if one is added to those of `Independently(p)`, or removed.

    Args:
        method: the method: `ClippedMean`, and `mean="all"`, which divides by a number that does not
            depend on which messages arrive.
        clients: how many clients there are, `n`; all have the same weight.
        noise: the noise multiplier, in units of `s`.
        rounds: the number of rounds.
        delta: `δ`, below one in `n`.

    Raises:
        ImportError: without `dp-accounting`.
        ValueError: for numbers out of range, another aggregate or mean, side information, or
            clients that are drawn and have a memory.

    Example:
        >>> import jaxcomp, optax
        >>> from jaxcomp import federated
        >>> method = federated.Method(
        ...     federated.LocalSteps(lambda w, x: (w - x) ** 2, optax.sgd(0.1)),
        ...     up=jaxcomp.qsgd_inf(bits=4),
        ...     sampling=federated.Independently(0.01),
        ...     aggregate=jaxcomp.aggregates.ClippedMean(1.0),
        ...     mean="all",
        ... )
        >>> found = account_privacy(method, 10_000, noise=1.0, rounds=100, delta=1e-5)
        >>> round(found.epsilon, 2), found.deviation, found.relation
        (0.72, 0.01, 'added or removed')

    References:
        McMahan, Ramage, Talwar and Zhang, `Learning differentially private recurrent language
        models <https://arxiv.org/abs/1710.06963>`_, 2018; Wang, Balle and Kasiviswanathan,
        `Subsampled Rényi differential privacy and analytical moments accountant
        <https://arxiv.org/abs/1808.00087>`_, 2019; Balle and Wang, `Improving the Gaussian
        mechanism for differential privacy <https://arxiv.org/abs/1805.06530>`_, 2018.

    Note:
        The exact `ε` of the Gaussian mechanism for `Everyone()`; an upper bound by privacy loss
        distributions for `Independently`, and by Rényi divergences for `Exactly`, where no tighter
        accountant of `dp-accounting` knows sampling without replacement. A draw helps only against
        those who do not know its key. It is for float32 parameters: the mean is rounded to the
        parameters' dtype before the noise. Rounding in float32 and noise from finite random bits
        are outside of the guarantee; so are losses and other reports.
    """
    checks.part("method", method, Method)
    checks.integer("clients", clients, 2)
    checks.integer("rounds", rounds, 1)
    checks.number("noise", noise, 0.0)
    checks.share("delta", delta)
    _check(method)
    norm: float = method.aggregate.norm  # pyright: ignore[reportAttributeAccessIssue]
    expected = method.sampling.expected(clients)
    alone = isinstance(method.sampling, Independently)
    most = (1 if alone else 2) * norm / expected
    dp = _accounting()
    if noise == 0:
        epsilon = math.inf
    elif alone and expected < clients:
        event = dp.PoissonSampledDpEvent(expected / clients, dp.GaussianDpEvent(noise))
        epsilon = _spent(dp.pld.PLDAccountant(), event, rounds, delta)
    elif expected < clients:
        # Its REPLACE_ONE takes a noise multiplier in units of `s`, not of the norm.
        gaussian = dp.GaussianDpEvent(noise)
        event = dp.SampledWithoutReplacementDpEvent(clients, int(expected), gaussian)
        replaced = dp.NeighboringRelation.REPLACE_ONE
        accountant = dp.rdp.RdpAccountant(neighboring_relation=replaced)
        epsilon = _spent(accountant, event, rounds, delta)
    else:
        epsilon = dp.get_epsilon_gaussian(noise / math.sqrt(rounds), delta)
    return Privacy(float(epsilon), noise * most, "added or removed" if alone else "replaced")


def _spent(accountant: Any, event: Any, rounds: int, delta: float) -> float:
    accountant.compose(event, rounds)
    return accountant.get_epsilon(delta)


def _accounting() -> Any:
    try:
        return importlib.import_module("dp_accounting")
    except ImportError as error:
        raise ImportError(
            "jaxcomp.federated.account_privacy needs dp-accounting: in a clone, "
            "pip install '.[privacy]'"
        ) from error


def _check(method: Method) -> None:
    """Raises a `ValueError` for a method whose mean one client moves by no known distance."""
    drawn, up = method.sampling != Everyone(), method.uplink
    wrong = {
        "`aggregate` must be jaxcomp.aggregates.ClippedMean(norm)": not isinstance(
            method.aggregate, ClippedMean
        ),
        "`mean` must be 'all', which divides by a fixed number": method.mean != "all",
        "`sampling` must be Everyone(), Exactly(r) or Independently(p)": not isinstance(
            method.sampling, Everyone | Exactly | Independently
        ),
        "`up` must have no side information": up.guided or up.guessed,
        # A memory tells in which rounds its client was drawn, which must stay unknown.
        "`work` must be without keep=True where clients are drawn": drawn and method.work.keep,
    }
    for says, found in wrong.items():
        if found:
            raise ValueError(f"{says} for an account of privacy, got {method!r}")
