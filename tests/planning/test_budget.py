"""A budget of bytes: within it, at the predicted error, and better than one codec for all."""

import inspect
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paths import ROOT

import jaxcomp
from jaxcomp.planning import budget, spend
from jaxcomp.reducers import choose

LADDER = {f"{bits}-bit": jaxcomp.qsgd_inf(bits=bits) for bits in (2, 4, 6, 8)}


def gradients(seed=0, dtype=jnp.float32):
    """Three matrices whose variances differ, a bias, an empty leaf and a name with glob signs."""
    a, b, c = jax.random.normal(jax.random.key(seed), (3, 64, 96))
    return {
        "loud": a.astype(dtype),
        "mid[0]*": (0.1 * b).astype(dtype),
        "quiet": (0.001 * c).astype(dtype),
        "bias": jnp.ones(64, dtype),
        "none": jnp.zeros((0, 4), dtype),
    }


def measured(policy, tree, keys=range(1, 9)):
    """The relative error of a message, over fresh noise."""
    wide = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    lost = 0.0
    for key in keys:
        decoded = jax.tree.leaves(jaxcomp.roundtrip(policy, key, tree))
        lost += sum(np.sum((np.asarray(d) - x) ** 2) for d, x in zip(decoded, wide, strict=True))
    return lost / len(keys) / sum(np.sum(x**2) for x in wide)


@pytest.mark.core("50000")
@pytest.mark.parametrize("size", [6_000, 9_000, 14_000, 50_000])
def test_bytes_are_within_the_budget_and_the_error_is_as_predicted(size):
    tree = gradients()
    found = spend(size, tree, codecs=LADDER)
    assert found.bytes == jaxcomp.wire_bytes(found.policy, tree) <= size
    assert measured(found.policy, tree) == pytest.approx(found.error, rel=0.05)
    errors = {leaf.path: leaf for leaf in found.leaves}
    assert errors["bias"].name == errors["none"].name == "dense"
    if found.uniform is not None:
        assert found.error <= found.uniform.error
        assert found.uniform.bytes <= size
    bits = [errors[name].bits_per_element for name in ("loud", "mid[0]*", "quiet")]
    assert bits == sorted(bits, reverse=True)


def test_all_leaves_are_dense_if_the_budget_is_large_enough():
    found = spend(10**9, gradients(), codecs=LADDER)
    assert found.error == 0
    assert {leaf.name for leaf in found.leaves} == {"dense"}
    assert jaxcomp.describe(found.policy, gradients()).payload_bytes == found.bytes


@pytest.mark.full
def test_a_budget_beats_one_codec_of_the_default_ones():
    assert [round(codec.facts.bits_per_element) for codec in budget.widths().values()] == [
        *range(1, 9)
    ]
    few = {name: budget.widths()[name] for name in ("eden 1-bit", "eden 2-bit", "eden 4-bit")}
    tree = gradients()
    size = jaxcomp.wire_bytes(jaxcomp.Policy(few["eden 2-bit"]), tree)
    found = spend(size, tree, codecs=few)
    assert (found.uniform.name, found.uniform.bytes) == ("eden 2-bit", size)
    assert found.error < 0.5 * found.uniform.error


@pytest.mark.parametrize("workers", [2, 8])
def test_with_workers_bytes_are_those_of_the_link(workers):
    tree = gradients()
    found = spend(20_000, tree, workers=workers, codecs=LADDER)
    sent = jaxcomp.wire_bytes(choose.link_or_reducer(found.policy), tree, workers)
    assert 18_000 < sent == found.bytes <= 20_000
    assert f"of {workers} workers" in str(found)


def test_several_steps_are_averaged_and_weights_count():
    quiet = jax.tree.map(lambda x: 0 * x, gradients())
    once, both = (spend(9_000, *g, codecs=LADDER) for g in ([gradients()], [gradients(), quiet]))
    assert both.leaves[1].variance == pytest.approx(once.leaves[1].variance / 2)
    assert both.error == pytest.approx(once.error)
    louder = {"loud": 1e-6, "mid[0]*": 1.0, "quiet": jnp.full((64, 96), 1e4), "bias": 1, "none": 1}
    found = {
        leaf.path: leaf for leaf in spend(9_000, gradients(), codecs=LADDER, weights=louder).leaves
    }
    assert found["quiet"].bits_per_element > found["loud"].bits_per_element
    assert measured(once.policy, gradients()) < 0.05


@pytest.mark.core("bfloat16")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_gradients(dtype):
    tree = gradients(dtype=dtype)
    found = spend(9_000, tree, codecs=LADDER)
    assert found.bytes == jaxcomp.wire_bytes(found.policy, tree)
    assert measured(found.policy, tree) == pytest.approx(found.error, rel=0.05)


@pytest.mark.parametrize("value", [0.0, 1e30, 1e-30])
def test_extreme_values(value):
    found = spend(3_000, {"w": jnp.full((64, 64), value)}, codecs=LADDER)
    assert np.isfinite(found.error)
    assert found.bytes <= 3_000


def test_the_policy_is_data_and_trains(mesh):
    """What a policy sends in a step is what the budget says, by the compiled program."""
    tree = {name: gradients()[name] for name in ("loud", "mid[0]*", "quiet")}
    found = spend(16_000, tree, workers=8, codecs=LADDER)
    tx = jaxcomp.compressed_mean(found.policy, "data", stats=True)
    state = jaxcomp.init_state(tx, tree, mesh, "data")
    step = jaxcomp.data_parallel(
        lambda state, g: tx.update(jax.tree.map(lambda x: x[0], g), state), mesh, "data"
    )
    stacked = jax.tree.map(lambda x: jnp.stack([x] * 8), tree)
    _, state = step(state, stacked)
    assert int(state.stats.link_bytes) == found.bytes
    assert float(state.stats.relative_error) == pytest.approx(found.error, rel=0.05)
    assert (
        eval(
            repr(found.policy),
            dict(inspect.getmembers(jaxcomp) + inspect.getmembers(jaxcomp.codecs)),
        )
        == found.policy
    )


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bytes_per_step": 1.5}, "`bytes_per_step` must be an integer"),
        (
            {"bytes_per_step": 100},
            "`bytes_per_step` must be at least .* give a codec of fewer bits",
        ),
        ({"codecs": [jaxcomp.sign()]}, "`codecs` must be codecs by name"),
        ({"codecs": {}}, "`codecs` must be codecs by name"),
        ({"codecs": {"dense": jaxcomp.sign()}}, "`codecs` must be codecs by name"),
        ({"workers": 1}, "`workers` must be at least 2"),
        ({"weights": {"loud": 1.0}}, "`weights` must be arrays or numbers like the gradients"),
        ({"weights": -1.0}, "`weights` must be finite and not negative"),
        ({"min_size": -1}, "`min_size` must be at least 0"),
    ],
)
def test_wrong_arguments_of_spend_are_named(settings, said):
    given = {"bytes_per_step": 9_000, "codecs": LADDER} | settings
    with pytest.raises(ValueError, match=said):
        spend(given.pop("bytes_per_step"), gradients(), **given)


@pytest.mark.wrong_types
def test_gradients_must_be_finite_values_of_one_shape():
    with pytest.raises(ValueError, match="`gradients` must be at least one tree"):
        spend(9_000)
    with pytest.raises(ValueError, match="`gradients` must be finite, got 'w'"):
        spend(9_000, {"w": jnp.full((64, 64), jnp.nan)})
    with pytest.raises(ValueError, match="`gradients` must hold values"):
        spend(9_000, {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)})
    with pytest.raises(ValueError, match="`gradients` must have the same leaves"):
        spend(9_000, {"w": jnp.ones((64, 64))}, {"w": jnp.ones((64, 65))})


def test_as_text_and_as_json():
    found = spend(9_000, gradients(), codecs=LADDER)
    text = str(found)
    assert "of 9,000 bytes in a worker's payload: error" in text
    assert "2-bit for all leaves: 4,144 bytes" in text
    told = json.loads(found.to_json())
    assert told["bytes"] == found.bytes
    assert told["uniform"]["name"] == found.uniform.name
    assert [leaf["path"] for leaf in told["leaves"]] == [leaf.path for leaf in found.leaves]


@pytest.mark.full
def test_the_page_runs_and_prints_its_table(capsys):
    page = (ROOT / "docs" / "budget.md").read_text()
    program, table = re.findall(r"```(?:python)?\n(.*?)```", page, flags=re.DOTALL)[:2]
    exec(program, {})
    assert capsys.readouterr().out == table
