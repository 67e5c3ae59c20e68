"""Forecasts of a layer of experts, whose tokens and answers cross the links."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import jax

from jaxcomp import checks
from jaxcomp.base import Codec
from jaxcomp.codecs import Identity
from jaxcomp.collectives import all_to_all, wire_bytes
from jaxcomp.feedback import Link, NoFeedback
from jaxcomp.planning import kept, planner
from jaxcomp.planning.kept import Clock
from jaxcomp.recipes.floats import mx
from jaxcomp.theory import comparison, cost
from jaxcomp.theory.candidates import Way
from jaxcomp.theory.comparison import Comparison, Conditions
from jaxcomp.theory.cost import Network

Codecs = tuple[Codec | None, Codec | None]

_MX = mx("mxfp8")
CODECS: Mapping[str, Codecs] = {
    "mxfp8 tokens, dense answers": (_MX, None),
    "mxfp8 tokens and answers": (_MX, _MX),
}
"""The codecs of tokens and answers that a plan compares by default; dense is bfloat16."""
_WRITTEN = {
    "mxfp8 tokens, dense answers": 'jaxcomp.mx("mxfp8")',
    "mxfp8 tokens and answers": 'jaxcomp.mx("mxfp8"), combine=jaxcomp.mx("mxfp8")',
}
_DENSE = {"dense float32": "float32", "dense bfloat16": "bfloat16"}


def plan_experts(
    tokens: int,
    width: int,
    workers: int | tuple[int, ...],
    network: Network,
    *,
    top: int = 2,
    layers: int = 1,
    codecs: "Mapping[str, Codecs] | None" = None,
    compute: float = 0.0,
    fast: Network | None = None,
    link_per: str = "host",
    link_only: bool = False,
    margin: float = 0.02,
    doubt: float = 0.25,
    clock: Clock | None = None,
) -> Comparison:
    """Forecasts whether `jaxcomp.algorithms.experts` is faster with compressed tokens and answers.

    A layer has four all-to-alls in a step: tokens and answers, forward and back. In each a device
    sends `(n − 1)/n` of `tokens · top` rows of `width` features. The baseline sends bfloat16.
    Between hosts a device sends the rows for other hosts over the slow link.

    Args:
        tokens: the number of tokens of one device in a step; with a capacity, that of its places
            divided by `top`.
        width: the features of a token.
        workers: the number of devices that have experts, or `(hosts, devices)`.
        network: the link of a device, or the slow one.
        top: the number of experts that each token goes to.
        layers: the number of layers with experts.
        codecs: pairs of a codec of the tokens and one of the answers by name, of which None is
            bfloat16; a gradient has the codec of its way forward. None for a usual selection.
        compute: seconds of a training step without communication.
        fast: the link between the devices of a host.
        link_per: "host" if all devices of a host share one slow link, "device" if each has its own.
        link_only: True counts only the links: no codec is timed.
        margin: the speedup of a step above which compression is recommended.
        doubt: the relative error to expect of forecasts.
        clock: a function that times a link, as for `jaxcomp.plan`.

    Raises:
        ValueError: for numbers out of range, fewer than two devices, a pair without `fast`, or a
            codec that is none.

    Example:
        >>> import jaxcomp
        >>> slow = jaxcomp.planning.Network(bandwidth=1.25e9, latency=50e-6)
        >>> found = plan_experts(4096, 2048, 8, slow, link_only=True)
        >>> found.best.way.name, round(found.best.speedup, 2)
        ('mxfp8 tokens and answers', 1.91)

    Note:
        Nothing runs beside the all-to-alls. `examples/moe_byte_lm.py` trains both ways, with
        `--combine mxfp8` the second one.
    """
    sizes = planner.sizes_of(workers, network, link_per)
    for name, value in {"tokens": tokens, "width": width, "top": top, "layers": layers}.items():
        checks.integer(name, value, 1)
    if len(sizes) > 2 or math.prod(sizes) < 2 or (len(sizes) > 1) != (fast is not None):
        raise ValueError(
            "`workers` must be at least 2 devices in all, or a pair (hosts, devices) beside "
            f"`fast`, got workers={workers!r} and fast={fast!r}"
        )
    clock, machines = kept.noting(clock, link_only)
    n, shared = math.prod(sizes), sizes[-1] if len(sizes) > 1 and link_per == "host" else 1
    rows = -(-tokens * top // n) * n  # Each device gets as many.
    ways = [
        _way(name, (None, None), (rows, width), dtype, sizes, layers, shared, clock)
        for name, dtype in _DENSE.items()
    ]
    for name, pair in (CODECS if codecs is None else codecs).items():
        _check(name, pair)
        ways.append(_way(name, pair, (rows, width), "bfloat16", sizes, layers, shared, clock))
    conditions = Conditions(
        compute=compute,
        fast=fast,
        margin=margin,
        doubt=doubt,
        elements=rows * width,
        workers=sizes,
        link_per=link_per,
        timed=not link_only,
        machine=", ".join(sorted(machines)),
        bold=True,
        means={} if codecs is not None else _WRITTEN,
        line="jaxcomp.algorithms.experts(expert, axis_name, {})",
        what=f"elements of tokens for experts in {layers} layer{'s' * (layers > 1)},",
    )
    return comparison.compare(ways, network, conditions, baseline="dense bfloat16")


def _way(
    name: str,
    pair: Codecs,
    shape: tuple[int, int],
    dtype: str,
    sizes: tuple[int, ...],
    layers: int,
    shared: int,
    clock: Clock,
) -> Way:
    """Tokens by the first codec and answers by the second, forward and back."""
    n, like = math.prod(sizes), jax.ShapeDtypeStruct(shape, dtype)
    size, work, timed = 0, 0.0, []
    for codec, other in (pair, pair[::-1]):
        # The gradient of a token has the codec of an answer: it takes the same way.
        back = Identity() if other is None else other
        sent = wire_bytes(all_to_all, like, codec, n, back=back, split_axis=0, concat_axis=0)
        size += sum(sent)
        if codec is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Tokens have no feedback.
                timed.append(clock(Link(codec, NoFeedback())))
            effort = cost.Effort(encodes=2.0, decodes=2.0)  # Forward, and the other way back.
            work += effort.seconds(timed[-1].work, math.prod(shape))
    inside = (sizes[-1] - 1) / (n - 1) if len(sizes) > 1 else 0.0
    slow, fast = (1 - inside) * size, inside * size
    rounds = 4 * layers
    return Way(
        name,
        cost.Price(shared * layers * slow, rounds * (n - 1) * (1 - inside), layers * work),
        dense=pair == (None, None),
        error=max((found.error for found in timed), default=None),
        fast=cost.Price(layers * fast, rounds * (n - 1) * inside),
        spread=max((found.spread for found in timed), default=0.0),
    )


def _check(name: str, pair: Any) -> None:
    known = isinstance(pair, tuple) and len(pair) == 2
    if not known or not all(isinstance(one, Codec | None) for one in pair):
        raise ValueError(
            "`codecs` must be pairs of codecs or None, of the tokens and of the answers, got "
            f"{pair!r} for {name!r}"
        )
