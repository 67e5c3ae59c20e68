"""The forecast of a round between sites, for a model, codecs and a link."""

from typing import Any

import jax

from jaxcomp import checks
from jaxcomp.base import Codec
from jaxcomp.feedback import Link, default
from jaxcomp.layout.policy import NOTHING, Policy
from jaxcomp.planning import models
from jaxcomp.reducers import choose
from jaxcomp.theory.cost import Network
from jaxcomp.theory.site_rounds import HANDLING, IDLE, TRIPS, SitesPlan
from jaxcomp.types import PyTree

Sent = Codec | Policy | Link | None


def plan_sites(
    params: PyTree | int,
    network: Network,
    *,
    up: Sent,
    down: Sent = None,
    upload: Network | None = None,
    steps: int = 100,
    step: float = 0.0,
    idle: float = IDLE,
    trips: float = TRIPS,
    handling: float = HANDLING,
) -> SitesPlan:
    """Forecasts a round of `jaxcomp.adapters.flower.Site`: what trains, sends and waits how long.

    `seconds = steps · step + up / upload + down / bandwidth + handling · P + idle + trips · delay`,
    with the delay there and back, for `P` bytes of parameters.

    Args:
        params: the parameters, or their shapes and dtypes; or the number of parameters, for a
            transformer like GPT-2.
        network: the link of a site; its latency is that of one way.
        up: the codec of a site's message; None sends it dense.
        down: the codec of the server's message; None sends the parameters.
        upload: the link from a site to the server, if it is another, as behind most modems;
            `network` is then that from the server.
        steps: of a round.
        step: seconds of a step.
        idle: seconds in which nothing is sent or computed, by default as measured with
            `jaxcomp_site.node` and Flower 1.42; with `flower-supernode` they are 5.3.
        trips: answers that a site waits for in a round, one after another, likewise.
        handling: seconds for each byte of the parameters in which site and server encode, decode
            and write checkpoints, by default as measured on two cores for all of them.

    Raises:
        ValueError: for numbers out of range, or codecs that are none.

    Example:
        >>> import jaxcomp
        >>> home = jaxcomp.planning.Network(bandwidth=1.25e6, latency=0.025)
        >>> found = plan_sites(1_000_000, home, up=jaxcomp.chunk_top_k(), steps=100, step=0.5)
        >>> round(found.training), round(found.sending, 1)
        (50, 3.2)
    """
    checks.part("network", network, Network)
    back = network if upload is None else upload
    checks.part("upload", back, Network)
    like = models.transformer(params) if isinstance(params, int) else params
    sent, received = _bytes("up", up, like), _bytes("down", down, like)
    delay, rates = network.latency + back.latency, (network.bandwidth, back.bandwidth)
    checks.number("handling", handling, 0.0)
    handled = handling * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))
    rest = (delay, idle, trips, rates[1], handled)
    return SitesPlan(steps, step, sent, received, rates[0], *rest)


def _bytes(name: str, given: Any, like: PyTree) -> int:
    """The bytes of a message in which small leaves are dense, as a method sends them."""
    if given is not None and not isinstance(given, Codec | Policy | Link):
        raise ValueError(
            f"`{name}` must be a codec such as jaxcomp.qsgd_inf(bits=4), a Policy, a Link or None, "
            f"got {given!r}"
        )
    given = NOTHING if given is None else given
    link = given if isinstance(given, Link) else Link(given, default(given))
    return choose.wire_bytes(link.policy, like)
