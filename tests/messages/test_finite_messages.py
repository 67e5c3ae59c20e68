"""Well-formed messages that would decode to NaN or Inf are refused, unless finite=False."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.posted import MATRIX, assert_same, draws, message
from helpers.suite import EVERY, few_or_all, label

import jaxcomp

FAMILIES = [
    jaxcomp.cast("bfloat16"),
    jaxcomp.sign(),
    jaxcomp.natural(),
    jaxcomp.mx("mxfp4"),
    jaxcomp.eden(bits=2),
    jaxcomp.qsgd_inf(bits=4, levels="midrise", subtractive=True),
    jaxcomp.sidco(fraction=0.01),
]
"""Values as they are, scales in floats and in integers, exponents as codes, rotations, dither."""


def forged(payload):
    """Every array of a payload in turn, replaced by the values of an attacker."""
    leaves, treedef = jax.tree.flatten(payload)
    for place, leaf in enumerate(leaves):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            values = [jnp.nan, jnp.inf, -jnp.inf, float(jnp.finfo(leaf.dtype).max)]
        elif leaf.dtype == jnp.int32:
            continue  # Counts of a sparse payload: what they may be, decoders bound.
        else:
            values = [jnp.iinfo(leaf.dtype).max]
        for value in values:
            array = np.full(leaf.shape, value, leaf.dtype)
            yield value, jax.tree.unflatten(treedef, [*leaves[:place], array, *leaves[place + 1 :]])


@pytest.mark.core("Cast(dtype='bfloat16',b=512)")
@pytest.mark.parametrize("codec", few_or_all(FAMILIES, EVERY), ids=label)
def test_what_is_accepted_decodes_to_finite_values(codec):
    honest, data = message(codec, draws(MATRIX.shape))
    assert_same(jaxcomp.from_bytes(codec, data, MATRIX), honest)
    for value, payload in forged(honest):
        data = jaxcomp.to_bytes(codec, payload, MATRIX)
        assert_same(jaxcomp.from_bytes(codec, data, MATRIX, finite=False), payload)
        try:
            read = jaxcomp.from_bytes(codec, data, MATRIX)
        except jaxcomp.MessageError:
            continue
        assert np.isfinite(value), f"{value} was let through"
        for key, worker in ((0, 0), (5, 3)):
            found = jaxcomp.decode(codec, key, read, MATRIX, worker=worker)
            assert np.isfinite(found).all(), f"{value} decodes to {np.asarray(found).max()}"


@pytest.mark.parametrize(
    ("codec", "place", "value", "says"),
    [
        (jaxcomp.sign(), 1, np.inf, r"got NaN or Inf in float32\[3\]"),
        (jaxcomp.cast("bfloat16"), 0, np.nan, r"got NaN or Inf in bfloat16\[3, 512\]"),
        (jaxcomp.mx("mxfp4"), 1, 255, "got a scale or code that decodes to NaN or Inf"),
    ],
    ids=["a scale", "a value", "an integer that stands for NaN"],
)
def test_the_error_says_what_is_not_finite(codec, place, value, says):
    leaves, treedef = jax.tree.flatten(message(codec, draws(MATRIX.shape))[0])
    leaves[place] = np.full(leaves[place].shape, value, leaves[place].dtype)
    data = jaxcomp.to_bytes(codec, jax.tree.unflatten(treedef, leaves), MATRIX)
    with pytest.raises(jaxcomp.MessageError, match=says):
        jaxcomp.from_bytes(codec, data, MATRIX)


def test_leaves_that_are_sent_as_they_are_must_be_finite_too():
    tree = {"kernel": draws(MATRIX.shape), "bias": jnp.full(9, jnp.inf)}
    policy = jaxcomp.Policy(jaxcomp.sign())
    payload, data = message(policy, tree)
    assert_same(jaxcomp.from_bytes(policy, data, tree, finite=False), payload)
    with pytest.raises(jaxcomp.MessageError, match=r"got NaN or Inf in float32\[9\]"):
        jaxcomp.from_bytes(policy, data, tree)
