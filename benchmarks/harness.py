"""What the benchmarks share: the codecs, the clock and the environment."""

import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

import jaxcomp

WORKERS = 8
CODECS = {
    "qsgd_inf 4-bit": jaxcomp.qsgd_inf(bits=4),
    "qsgd_inf 8-bit": jaxcomp.qsgd_inf(bits=8),
    "qsgd 4-bit": jaxcomp.qsgd(bits=4),
    "sign": jaxcomp.sign(),
    "terngrad": jaxcomp.terngrad(),
    "cast bfloat16": jaxcomp.cast("bfloat16"),
    "cast float8_e4m3fn": jaxcomp.cast("float8_e4m3fn"),
    "top_k 1 %": jaxcomp.top_k(fraction=0.01),
}


def median_time(run: Callable[[], Any], repeats: int) -> float:
    run()  # Warm: pages are mapped, programs compiled.
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def environment() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": device.device_kind,
        "platform": device.platform,
        "cores": os.cpu_count(),
        "jaxcomp": jaxcomp.__version__,
    }
