"""Forecasts of a step of a fully sharded model, whose weights and gradients cross the links."""

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Any

import jax

from jaxcomp import checks
from jaxcomp.base import Codec
from jaxcomp.feedback import Link, NoFeedback
from jaxcomp.layout import policy as policy_, trees
from jaxcomp.layout.policy import Policy
from jaxcomp.planning import kept, models, planner, timing
from jaxcomp.planning.kept import Clock
from jaxcomp.recipes.quantizers import cast, qsgd_inf
from jaxcomp.theory import comparison, cost
from jaxcomp.theory.candidates import Way
from jaxcomp.theory.comparison import Comparison, Conditions
from jaxcomp.theory.cost import Network
from jaxcomp.types import PyTree
from jaxcomp.wire import buffer, cost as wire_cost

Codecs = Codec | Policy | None

CODECS: Mapping[str, tuple[Codecs, Codecs]] = {
    "8-bit weights, 8-bit gradients": (qsgd_inf(bits=8), qsgd_inf(bits=8)),
    "8-bit weights, 4-bit gradients": (qsgd_inf(bits=8), qsgd_inf(bits=4)),
    "bfloat16 weights, 4-bit gradients": (cast("bfloat16"), qsgd_inf(bits=4)),
}
"""The codecs of weights and gradients that a plan compares by default."""

_WRITTEN = {
    "8-bit weights, 8-bit gradients": "weights=jaxcomp.qsgd_inf(bits=8)",
    "8-bit weights, 4-bit gradients": "weights=jaxcomp.qsgd_inf(bits=8), "
    "gradients=jaxcomp.qsgd_inf(bits=4)",
    "bfloat16 weights, 4-bit gradients": 'weights=jaxcomp.cast("bfloat16"), '
    "gradients=jaxcomp.qsgd_inf(bits=4)",
}
_LINES = [
    f"jaxcomp.fully_sharded(loss_fn, mesh, {names}, specs, {{}})"
    for names in ('"fsdp"', '("dcn", "fsdp")')
]
_BFLOAT16 = policy_.everywhere(cast("bfloat16"))


def plan_fsdp(
    params: PyTree | int,
    workers: int | tuple[int, ...],
    network: Network,
    *,
    codecs: "Mapping[str, tuple[Codecs, Codecs]] | None" = None,
    gathers: int = 2,
    second_copy: bool = False,
    compute: float = 0.0,
    backward: float = 0.0,
    overlap: float = 0.0,
    fast: Network | None = None,
    link_per: str = "host",
    link_only: bool = False,
    margin: float = 0.02,
    doubt: float = 0.25,
    clock: Clock | None = None,
) -> Comparison:
    """Forecasts whether `jaxcomp.fully_sharded` is faster with compressed weights and gradients.

    In a step a device sends `(n − 1)/n` of the weights' payload for each time that they are
    gathered, and as much of the gradients'. The baseline sends both in bfloat16. Between hosts a
    device sends its shard over the slow link, and the shards of its column over the fast one.

    Args:
        params: the parameters, or their shapes and dtypes; or the number of parameters, for a
            transformer like GPT-2.
        workers: the number of devices, or `(hosts, devices)`; all of them shard the
            model.
        network: the link of a device, or the slow one.
        codecs: pairs of a codec of the weights and one of the gradients by name, of which None is
            dense; None for a usual selection.
        gathers: how many times a step gathers the weights: twice if the backward pass gathers a
            layer again, as inside `jax.checkpoint`.
        second_copy: whether `jaxcomp.second_copy` is the policy of that `jax.checkpoint`: the
            weights cross the slow link once, and the fast one each time.
        compute: seconds of a training step without communication.
        backward: seconds of its backward pass.
        overlap: the fraction of the backward pass that overlaps with communication.
        fast: the link between the devices of a host.
        link_per: "host" if all devices of a host share one slow link, "device" if each has its own.
        link_only: True counts only the links: no codec is timed.
        margin: the speedup of a step above which compression is recommended.
        doubt: the relative error to expect of forecasts.
        clock: a function that times a link, as for `plan`.

    Raises:
        ValueError: for numbers out of range, fewer than two devices, a pair without
            `fast`, or a codec that is none.

    Example:
        >>> import jaxcomp
        >>> slow = jaxcomp.planning.Network(bandwidth=12.5e6, latency=1e-4)
        >>> found = plan_fsdp(1_000_000, 8, slow, link_only=True)
        >>> found.best.way.name, round(found.best.speedup, 1)
        ('8-bit weights, 4-bit gradients', 2.3)
    """
    sizes = planner.sizes_of(workers, network, link_per)
    _check(workers, sizes, fast, gathers, second_copy)
    like = models.transformer(params) if isinstance(params, int) else params
    clock, machines = kept.noting(clock, link_only)
    sharing = sizes[-1] if len(sizes) > 1 and link_per == "host" else 1
    named = {"dense float32": (None, None), "dense bfloat16": (_BFLOAT16, _BFLOAT16)}
    ways = []
    for name, pair in (named | dict(CODECS if codecs is None else codecs)).items():
        weights, gradients = _policies(name, pair)
        timed: list[timing.Measured] = []
        times = (1 if second_copy else gathers), gathers
        total, inside = _prices(like, weights, sizes, clock, timed, gathers=times)
        more, within = _prices(like, gradients, sizes, clock, timed)
        ways.append(
            Way(
                name,
                dataclasses.replace(total + more, bytes=sharing * (total.bytes + more.bytes)),
                dense=name in named,
                error=None if name in named else max((found.error for found in timed), default=0.0),
                fast=inside + within,
                spread=max((found.spread for found in timed), default=0.0),
            )
        )
    conditions = Conditions(
        compute=compute,
        backward=backward,
        overlap=overlap,
        fast=fast,
        margin=margin,
        doubt=doubt,
        elements=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(like)),
        workers=sizes,
        link_per=link_per,
        timed=not link_only,
        machine=", ".join(sorted(machines)),
        means={} if codecs is not None else _WRITTEN,
        line=_LINES[len(sizes) > 1],
    )
    return comparison.compare(ways, network, conditions, baseline="dense bfloat16")


def _check(workers: Any, sizes: Any, fast: Any, gathers: int, second_copy: bool) -> None:
    checks.integer("gathers", gathers, 1)
    checks.flag("second_copy", second_copy)
    if len(sizes) > 2 or math.prod(sizes) < 2 or (len(sizes) > 1) != (fast is not None):
        raise ValueError(
            "`workers` must be at least 2 devices in all, or a pair (hosts, devices) beside "
            f"`fast`, got workers={workers!r} and fast={fast!r}"
        )
    if second_copy and fast is None:
        raise ValueError("`second_copy` needs `fast`, the link within a host")


def _prices(
    like: PyTree,
    policy: Policy,
    sizes: tuple[int, ...],
    clock: Clock,
    timed: list[timing.Measured],
    gathers: tuple[int, int] | None = None,
) -> tuple[cost.Price, cost.Price]:
    """The price of all weights, or of all gradients, over the slow links and over the fast ones.

    Args:
        like: the parameters.
        policy: the codecs.
        sizes: the number of hosts, and of devices of each.
        clock: a function that times a link.
        timed: what it found is added to this list.
        gathers: how many times weights are gathered over either; None for gradients.
    """
    layout, (crossed, times) = trees.layout(policy, like), gathers or (1, 1)
    size = buffer.fused_bytes(wire_cost.payload_like(layout.batches)) + trees.dense_bytes(layout)
    slow, inner = sizes[0], math.prod(sizes[1:])
    price = cost.Price(crossed * size * (slow - 1) / (slow * inner), crossed * (slow - 1))
    fast = cost.Price(times * size * (inner - 1) / inner, times * (inner - 1))
    n = slow * inner
    effort = cost.Effort(encodes=1 / n, decodes=1.0)
    if gathers is None:
        effort = cost.Effort(encodes=1.0, decodes=1 / n, adds=(n - 1) / n)
    for codec in () if policy is _BFLOAT16 else policy.codecs:
        leaves = zip(layout.likes, layout.codecs, strict=True)
        elements = sum(like.size for like, own in leaves if own == codec)
        if elements:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Weights have no feedback.
                timed.append(clock(Link(codec, NoFeedback())))
            price += cost.Price(work=times * effort.seconds(timed[-1].work, elements))
    return price, fast


def _policies(name: str, pair: Any) -> tuple[Policy, ...]:
    known = isinstance(pair, tuple) and len(pair) == 2
    if not known or not all(isinstance(one, Codec | Policy | None) for one in pair):
        raise ValueError(
            "`codecs` must be pairs of codecs, policies or None, of the weights and of the "
            f"gradients, got {pair!r} for {name!r}"
        )
    return tuple(policy_.NOTHING if one is None else policy_.of(one) for one in pair)
