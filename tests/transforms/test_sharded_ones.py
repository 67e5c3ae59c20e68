"""Sharded models on meshes of 1 to 12 axes, of which any may have one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sharding import EF_SIGN, QSGD, draw, make_mesh, put, zeros
from jax.sharding import PartitionSpec as P

import jaxcomp

SHAPES = {"kernel": (64, 96), "table": (47, 43), "bias": (96,), "scale": ()}
LINKS = {
    "gather": jaxcomp.Gather(QSGD),
    "two shot": jaxcomp.TwoShot(EF_SIGN, EF_SIGN),
    "low rank": jaxcomp.PowerIteration(rank=2),
}
SPECS = {"kernel": P("fsdp", "tensor"), "bias": P("tensor")}
MAXTEXT = {
    "diloco": 1, "dcn": 2, "stage": 1, "fsdp": 2, "fsdp_transpose": 1, "sequence": 1,
    "context": 1, "context_autoregressive": 1, "tensor": 2, "tensor_transpose": 1, "expert": 1,
    "autoregressive": 1,
}  # fmt: skip
MESHES = {
    "one first": ({"replica": 1, "dcn": 2, "fsdp": 2, "tensor": 2}, SPECS),
    "maxtext": (
        MAXTEXT,
        {"kernel": P(("fsdp", "sequence"), ("tensor", "expert")), "bias": P(("stage", "tensor"))},
    ),
    "no fast axis of several devices": ({"dcn": 2, "fsdp": 1, "tensor": 1}, SPECS),
    "one, not named": ({"dcn": 2, "fsdp": 1, "tensor": 4}, {"kernel": P(None, "tensor")}),
    "one, named": ({"dcn": 2, "fsdp": 1, "tensor": 4}, SPECS),
    "last, named alone": ({"dcn": 2, "fsdp": 4, "tensor": 1}, {"kernel": P("tensor", "fsdp")}),
    "one worker": ({"dcn": 1, "fsdp": 1, "tensor": 4}, SPECS),
    "one worker, one axis": ({"dcn": 1}, {}),
    "workers alone, and a one": ({"dcn": 8, "fsdp": 1}, {"kernel": P("fsdp")}),
}
CASES = [
    *((name, "two shot", True) for name in MESHES),
    *((name, "two shot", False) for name in ("maxtext", "one, not named", "one worker")),
    *((name, link, True) for name in ("maxtext", "one worker") for link in ("gather", "low rank")),
]
FEW = CASES[1], CASES[7]


def specs_of(given, names=None):
    """A spec for each leaf, of some of the axes."""

    def keep(entry):
        entry = entry if isinstance(entry, tuple) else (entry,)
        return tuple(n for n in entry if names is None or n in names) or None

    return {k: P(*map(keep, given.get(k, P()))) for k in SHAPES}


def train(sizes, specs, reducer, check_vma, steps=2):
    """The last mean and the memory."""
    mesh = make_mesh(sizes)
    tx = jaxcomp.compressed_mean(reducer, "dcn", key=5, param_specs=specs, stats=True)
    params = zeros(SHAPES, mesh, specs)
    state = jaxcomp.init_state(tx, params, mesh, "dcn")

    def step(state, grads):
        mean, state = tx.update(jax.tree.map(lambda x: x[0], grads), state, params)
        return state, mean

    run = jaxcomp.data_parallel(step, mesh, "dcn", check_vma=check_vma)
    for seed in range(steps):
        grads = put(draw(SHAPES, seed, sizes["dcn"]), mesh, specs, "dcn")
        state, mean = run(state, grads)
    for k, x in mean.items():
        assert x.sharding.is_equivalent_to(params[k].sharding, x.ndim)
    return jax.tree.map(np.asarray, (mean, state.memory.tree, state.stats))


@pytest.mark.core("maxtext-two shot-True")
@pytest.mark.parametrize(
    ("name", "link", "check_vma"),
    [pytest.param(*case, marks=() if case in FEW else pytest.mark.full) for case in CASES],
)
def test_an_axis_of_one_device_changes_nothing(name, link, check_vma):
    """The bits are those of the mesh without such axes."""
    sizes, given = MESHES[name]
    found = train(sizes, specs_of(given), LINKS[link], check_vma)
    wide = {axis: size for axis, size in sizes.items() if size > 1 or axis == "dcn"}
    want = train(wide, specs_of(given, wide), LINKS[link], check_vma)
    jax.tree.map(np.testing.assert_array_equal, found, want)
    assert np.isfinite(float(found[2].relative_error))


@pytest.mark.full
@pytest.mark.parametrize("name", MESHES)
def test_exact_messages_give_the_mean(name):
    sizes, given = MESHES[name]
    mean, *_ = train(sizes, specs_of(given), jaxcomp.Gather(jaxcomp.codecs.Identity()), True, 1)
    for k, x in draw(SHAPES, 0, sizes["dcn"]).items():
        np.testing.assert_allclose(mean[k], x.mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_workers_on_axes_of_one_device():
    """Two levels of workers, of which the fast one has one device."""
    sizes = {"dcn": 2, "fsdp": 1, "tensor": 4}
    mesh, specs = make_mesh(sizes), {"kernel": P(None, "tensor")}
    reducer = jaxcomp.Hierarchical(outer=EF_SIGN)
    tx = jaxcomp.compressed_mean(reducer, ("dcn", "fsdp"), param_specs=specs)
    params = {"kernel": jnp.zeros((64, 96))}
    state = jax.eval_shape(functools.partial(jaxcomp.init_state, tx, params, mesh, ("dcn", "fsdp")))

    def step(state, grads):
        mean, state = tx.update(jax.tree.map(lambda x: x[0], grads), state, params)
        return state, mean

    run = jaxcomp.data_parallel(step, mesh, ("dcn", "fsdp"))
    grads = {"kernel": jax.ShapeDtypeStruct((2, 64, 96), jnp.float32)}
    after, mean = jax.eval_shape(run, state, grads)
    assert jax.tree.map(jnp.shape, mean) == {"kernel": (64, 96)}
    assert jax.tree.structure(after) == jax.tree.structure(state)
