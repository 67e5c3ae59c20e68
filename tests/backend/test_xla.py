"""Directions to the compiler change no value, and do what they say to a program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp.backend import xla

RNG = np.random.default_rng(0)


def test_a_function_is_separate_where_it_is_traced_and_has_derivatives():
    def f(x, settings):
        return {"y": jnp.sin(x["a"]) * settings, "z": x["a"].sum()}

    separate = xla.compile_separately(f)
    x, two = {"a": jnp.arange(6.0).reshape(2, 3)}, jnp.float32(2)
    want = f(x, two)
    jax.tree.map(np.testing.assert_array_equal, separate(x, two), want)
    lowered = jax.jit(separate).lower(x, two)
    assert 'inlineable = "false"' in lowered.as_text()
    jax.tree.map(np.testing.assert_array_equal, lowered.compile()(x, two), jax.jit(f)(x, two))
    rows = jax.jit(jax.vmap(separate, in_axes=(0, None)))(x, two)
    np.testing.assert_array_equal(rows["z"], x["a"].sum(1))
    slope = jax.grad(lambda a: separate({"a": a}, two)["y"].sum())(x["a"])
    np.testing.assert_allclose(slope, 2 * np.cos(x["a"]), rtol=1e-6)


def test_small_work_is_not_worth_a_function():
    def f(x):
        return x + 1

    assert xla.compile_separately(f, size=1000) is f
    assert xla.compile_separately(f, size=2**20) is not f


def test_values_of_constants_are_known_while_a_program_is_traced():
    seen = []

    @jax.jit
    def f(x):
        with xla.constants():
            seen.append(float(jnp.arange(4.0).sum()))
        seen.append(float(xla.evaluate(jnp.sum, np.ones(3, np.float32))))
        return x

    f(jnp.zeros(2))
    assert seen == [6.0, 3.0]


@pytest.mark.parametrize("sizes", [(3, 0, 5), (2**18, 7, 2**16), (9,)], ids=str)
def test_parts_are_joined_and_cut_again(sizes):
    """Long parts are put in place one by one on a CPU."""
    parts = [RNG.standard_normal((size, 1)).astype(np.float32) for size in sizes]
    begins = np.cumsum([0, *sizes[:-1]]).tolist()

    def run(parts):
        flat = xla.join(parts)
        return flat, xla.cut(flat, begins, sizes)

    flat, again = jax.jit(run)([jnp.asarray(part) for part in parts])
    np.testing.assert_array_equal(flat, np.concatenate(parts)[:, 0])
    for got, want in zip(again, parts, strict=True):
        np.testing.assert_array_equal(got, want[:, 0])


def test_arguments_of_many_lengths_are_filled_to_powers_of_two():
    lengths = []

    def f(x):
        lengths.append(len(x))
        return {"y": x * 2}

    run = jax.jit(lambda *xs: [xla.in_few_shapes(f)(x)["y"] for x in xs])
    given = [jnp.arange(float(n)) for n in (5, 7, 8, 3)]
    for got, want in zip(run(*given), given, strict=True):
        np.testing.assert_array_equal(got, 2 * want)
    assert set(lengths) == {8, 4}
    assert [xla.power_of_two(n) for n in (0, 1, 2, 3, 1024, 1025)] == [1, 1, 2, 4, 1024, 2048]


def test_a_product_without_its_last_bit_is_not_fused():
    x = np.array([1 + 2**-23, -3.0, 0.0, np.inf], np.float32)
    np.testing.assert_array_equal(xla.block_fma(jnp.asarray(x)), np.array([1, -3, 0, np.inf]))
