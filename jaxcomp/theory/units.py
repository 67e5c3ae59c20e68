"""Readable text for times and speeds."""

import math


def duration(seconds: float) -> str:
    """A readable time: 1.23 s, 45.6 ms, 7.89 µs."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"


def speed(bandwidth: float) -> str:
    """A bandwidth in bits per second, from one in bytes: 9.6 Gbit/s."""
    if bandwidth == math.inf:
        return "any speed"
    if bandwidth <= 0:
        return "never"
    for unit, scale in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if 8 * bandwidth >= scale:
            return f"{8 * bandwidth / scale:.3g} {unit}"
    return f"{8 * bandwidth / 1e3:.3g} kbit/s"
