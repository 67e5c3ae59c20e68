"""Rows that are processed in blocks have the results of all rows at once."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.backend import blocking


def numbered(first, x, common):
    """Each row depends on its number, as the noise of a bucket does."""
    numbers = first + jnp.arange(len(x), dtype=jnp.uint32)
    return {"row": x + common, "number": numbers * jnp.uint32(7)}


def test_rows_of_a_block_have_their_own_numbers(monkeypatch):
    monkeypatch.setattr(blocking, "_CHUNK", 64)
    x = jnp.arange(11.0 * 16).reshape(11, 16)  # Two blocks of four rows, and one that overlaps.
    first, common = jnp.uint32(5), jnp.float32(0.5)
    want = numbered(first, x, common)
    run = jax.jit(lambda *given: blocking.over_rows(numbered, *given[:2], common=given[2:]))
    jax.tree.map(np.testing.assert_array_equal, run(first, x, common), want)


def test_rows_that_are_read_more_than_once_are_processed_in_parts(monkeypatch):
    monkeypatch.setattr(blocking, "_PART", 64)
    x = jnp.arange(11.0 * 16).reshape(11, 16)  # Two parts, of which the last one overlaps.
    seen = []

    def norms(x, y):
        seen.append(x.shape)
        return jnp.sqrt((x * x).sum(1)) + y[:, 0]

    found = jax.jit(lambda x, y: blocking.in_turn(norms, x, y))(x, -x)
    np.testing.assert_array_equal(found, jax.jit(norms)(x, -x))
    assert (6, 16) in seen
