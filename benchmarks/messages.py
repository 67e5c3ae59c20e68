"""Bits an element of messages, and the time to write and read them.

    python benchmarks/messages.py

Payloads of four million numbers of a normal law, and of their cubes, which have heavy tails. "Ours"
writes every array by the methods of the library alone, "Zstandard" writes each by Zstandard, and
"message" is what `to_bytes` does: Zstandard for large arrays where it is at most 2 % longer. Times
are the fastest of a few, of `to_bytes` and `from_bytes(finite=False)`, on arrays of the host.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
import reporting

import jaxcomp
from jaxcomp.messages import arrays

CODECS = {
    'cast("float32")': jaxcomp.cast("float32"),
    'cast("bfloat16")': jaxcomp.cast("bfloat16"),
    "qsgd_inf(bits=8)": jaxcomp.qsgd_inf(bits=8),
    "qsgd_inf(bits=4)": jaxcomp.qsgd_inf(bits=4),
    "qsgd_inf(bits=2)": jaxcomp.qsgd_inf(bits=2),
    "qsgd(bits=4)": jaxcomp.qsgd(bits=4),
    "natural()": jaxcomp.natural(),
    'mx("mxfp4")': jaxcomp.mx("mxfp4"),
    "eden(bits=4)": jaxcomp.eden(bits=4),
    "terngrad()": jaxcomp.terngrad(),
    "sign()": jaxcomp.sign(),
    "sidco(fraction=0.01)": jaxcomp.sidco(fraction=0.01),
    "top_k(fraction=0.01)": jaxcomp.top_k(fraction=0.01),
}
SIDE = 2048
LAWS = {"normal": 1, "heavy tails": 3}
"""The power of a normal number."""
WAYS: dict[str, dict[str, Any]] = {
    "ours": {"_LARGE": 2**62},
    "zstd": {
        "_LARGE": 1,
        "_is_nearly_as_short": lambda *_: True,
        "_offers": lambda *_: (arrays.ZSTD, None, None),
    },
    "message": {"_LARGE": arrays._LARGE},
}


def fastest(call: Callable[[], Any], repeats: int) -> float:
    """Nanoseconds an element."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e9 * min(times) / SIDE**2


def cases(options: Any) -> Iterator[dict[str, Any]]:
    for name, codec in CODECS.items():
        for law, power in LAWS.items():
            x = np.random.default_rng(0).standard_normal((SIDE, SIDE), np.float32) ** power
            payload = jax.device_get(jaxcomp.encode(codec, 0, x))
            record: dict[str, Any] = {"codec": name, "law": law}
            record["collective"] = 8 * jaxcomp.wire_bytes(codec, x) / x.size
            write = functools.partial(jaxcomp.to_bytes, codec, payload, x)
            for way, settings in WAYS.items():
                with mock.patch.multiple(arrays, **settings):
                    data = write()
                    record[f"{way}_write"] = fastest(write, options.repeats)
                read = functools.partial(jaxcomp.from_bytes, codec, data, x, finite=False)
                record[f"{way}_read"] = fastest(read, options.repeats)
                record[f"{way}_bits"] = 8 * len(data) / x.size
            yield record


COLUMNS = (
    "codec {codec} | numbers {law} | in a collective {collective:.2f} | "
    "ours {ours_bits:.2f} | write, ns {ours_write:.1f} | read {ours_read:.1f} | "
    "Zstandard {zstd_bits:.2f} | write {zstd_write:.1f} | read {zstd_read:.1f} | "
    "message {message_bits:.2f} | write {message_write:.1f} | read {message_read:.1f}"
)


def main() -> None:
    options = reporting.options(__doc__, "out/messages", repeats=(3, "timed calls of each"))
    runs = []
    for record in cases(options):
        print(record, flush=True)
        runs.append(record)
    text = (__doc__ or "").split("\n\n")[2].rstrip()
    table = reporting.Table("Bits an element of messages", COLUMNS, runs)
    reporting.show(table, {"runs": runs}, options.out / "messages.md", before=text)


if __name__ == "__main__":
    main()
