"""Values that are computed digit by digit for a row stay out of the loops over its elements."""

import re

import jax
import jax.numpy as jnp
import pytest

from jaxcomp.numerics import exact
from jaxcomp.sparsify import logarithm

CHAINS = {
    "log2": logarithm.log2,
    "exp2": logarithm.exp2,
    "reciprocal": lambda x: exact.reciprocal(x, "interpreted"),
    "sqrt": lambda x: exact.sqrt(x, "interpreted"),
}


@pytest.mark.parametrize("name", CHAINS)
def test_digits_are_computed_once_a_row(name):
    """In a loop over elements, LLVM needs time exponential in their number: it does not end."""

    def above(x, y):
        return jnp.sum(jnp.abs(x) >= CHAINS[name](jnp.sum(y, axis=1, keepdims=True)), axis=1)

    like = jax.ShapeDtypeStruct((1, 1073), jnp.float32)
    text = jax.jit(above).trace(like, like).lower().compile().as_text()
    loops = [loop for loop in re.findall(r"^%.*?^}", text, re.M | re.S) if "1073]" in loop]
    assert max(loop.count(" select(") for loop in loops) < 5
