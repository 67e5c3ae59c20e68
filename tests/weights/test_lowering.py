"""The programs of a publisher lower for accelerators: only coded bytes come to the host."""

import jax
import jax.numpy as jnp
import pytest

from jaxcomp.weights import changed, checksums, fast, small, whole, windows
from jaxcomp_weights import patterns

SIZE, SLOTS = 1 << 16, 4096
BITS = jax.ShapeDtypeStruct((SIZE,), jnp.uint16)
PLACES = jax.ShapeDtypeStruct((SLOTS,), jnp.int32)
NUMBER = jax.ShapeDtypeStruct((), jnp.int32)
ENDS = jax.ShapeDtypeStruct((3,), jnp.int32)
FORM = patterns.FORMATS["bfloat16"]


def table(size):
    return jax.ShapeDtypeStruct((size,), jnp.uint32)


CHANGES = (BITS, BITS, PLACES, NUMBER, NUMBER)
SYMBOLS = jax.eval_shape(lambda *args: small.symbols(*args, form=FORM), *CHANGES, NUMBER)
LEAF = jax.ShapeDtypeStruct((400, 400), jnp.bfloat16)
BITMAP = jax.ShapeDtypeStruct((1, SIZE // 32), jnp.uint32)
SPLIT = jax.ShapeDtypeStruct((), jnp.uint32)
ENTRIES = table(small.ENTRIES)
PROGRAMS = {
    "window": (windows._slice, (LEAF, NUMBER), {"width": SIZE}),
    "find": (changed.find, (BITS, BITS, NUMBER, NUMBER), {}),
    "places": (changed.places, (BITMAP,), {"slots": SLOTS}),
    "fast": (
        fast.encode,
        (BITMAP, BITS, BITS, NUMBER, NUMBER, NUMBER, ENDS, SPLIT),
        {"slots": SLOTS, "form": FORM},
    ),
    "symbols": (small.symbols, (*CHANGES, NUMBER), {"form": FORM}),
    "small": (small.encode, (SYMBOLS, NUMBER, ENTRIES, ENTRIES), {}),
    "whole": (whole.encode, (BITS, NUMBER, NUMBER, table(256), table(256)), {"rotated": True}),
    "sums": (checksums.of_window, (BITS, NUMBER, NUMBER, NUMBER, ENDS), {}),
}


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_lower_for_accelerators(name, platform):
    program, args, options = PROGRAMS[name]
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        traced = program.trace(*args, **options)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo" in text
    assert "callback" not in text  # Nothing comes to the host in between.
