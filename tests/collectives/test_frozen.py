"""Leaves of a sharded model that are not trained: exact in any dtype, and nothing travels back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxcomp

KEYS = jax.random.split(jax.random.key(0), 6)
EIGHT = jaxcomp.qsgd_inf(bits=8)
PARAMS = {
    "blocks": {
        "base": jax.random.randint(KEYS[0], (3, 64, 64), -127, 127).astype(jnp.int8),
        "scale": jnp.full((3, 64), 1 / 400),
        "lora": jax.random.normal(KEYS[1], (3, 64, 64)) / 20,
    },
    "head": {
        "base": jax.random.normal(KEYS[2], (64, 64)) / 8,
        "eight": jax.random.normal(KEYS[3], (64, 8)).astype(jnp.float8_e4m3fn),
        "mask": jnp.arange(64) % 3 > 0,
        "lora": jax.random.normal(KEYS[4], (64, 64)) / 20,
    },
}
MASK = {
    "blocks": {"base": True, "scale": True, "lora": False},
    "head": {"base": True, "eight": True, "mask": True, "lora": False},
}
GLOBS = ("blocks/base", "blocks/scale", "head/base", "head/eight", "head/mask")
X = jax.random.normal(KEYS[5], (64, 64))


def loss(params, x):
    """Returns the frozen leaves of the head, too."""

    @jax.checkpoint
    def layer(h, own):
        own = jaxcomp.gathered(own)
        base = own["base"].astype(h.dtype) * own["scale"]
        return jnp.tanh(h @ (base + own["lora"])), own["base"]

    h, base = lax.scan(layer, x, params["blocks"])
    head = dict(params["head"])
    out = h @ (head["base"] + head.pop("lora")) * head["mask"]
    low = jnp.mean(head["eight"].astype(x.dtype)) * jnp.mean(h)
    return jnp.mean((out - x) ** 2) + low, {"blocks": base, **head}


def of_trained(params):
    """The loss of the trained leaves, by the whole batch on one device."""
    whole = {k: {**PARAMS[k], **params[k]} for k in PARAMS}
    return loss(whole, X)[0]


def sharded(sizes, frozen, **settings):
    mesh = jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )
    names = tuple(sizes)
    specs = {"blocks": {"base": P(None, names), "scale": P(), "lora": P(None, None, names)}}
    specs["head"] = P(names)
    given = {"weights": EIGHT, "stacked": ("blocks/*",), "has_aux": True, **settings}
    f = jaxcomp.fully_sharded(loss, mesh, names, specs, frozen=frozen, **given)
    homes = jax.tree.broadcast(specs, PARAMS, is_leaf=lambda x: isinstance(x, P))
    put = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), PARAMS, homes)
    return f, put


@pytest.mark.parametrize(
    ("sizes", "typed"),
    [
        ({"fsdp": 8}, True),
        pytest.param({"dcn": 2, "fsdp": 4}, True, marks=pytest.mark.full),
        pytest.param({"fsdp": 8}, False, marks=pytest.mark.full),
    ],
)
def test_frozen_leaves_are_exact_and_nothing_travels_back(sizes, typed):
    f, params = sharded(sizes, GLOBS, check_vma=typed)
    (value, found), grads = f(params, X, key=0)
    for name, x in found.items():
        want = PARAMS["blocks"]["base"] if name == "blocks" else PARAMS["head"][name]
        assert x.dtype == want.dtype
        np.testing.assert_array_equal(x, want)
    loras = {name: {"lora": tree["lora"]} for name, tree in PARAMS.items()}
    want, slopes = jax.value_and_grad(of_trained)(loras)
    np.testing.assert_allclose(value, want, rtol=0.02)
    for name, tree in grads.items():
        assert {k for k, x in tree.items() if x is not None} == {"lora"}
        error = np.linalg.norm(tree["lora"] - slopes[name]["lora"])
        assert error < 0.03 * np.linalg.norm(slopes[name]["lora"])

    tx = jaxcomp.freeze(optax.adamw(1e-2), MASK)
    updates, _ = tx.update(grads, tx.init(params), params)
    for name, tree in optax.apply_updates(params, updates).items():
        for leaf, x in tree.items():
            assert x.dtype == params[name][leaf].dtype
            assert bool((x == params[name][leaf]).all()) == (leaf != "lora")


def test_bytes_of_frozen_leaves():
    """Those of the program, which gathers the layers again in the backward pass."""
    f, params = sharded({"fsdp": 8}, MASK, has_aux=False)
    f = jaxcomp.fully_sharded(
        lambda *args: loss(*args)[0], f.parts.mesh, "fsdp", f.parts.specs, weights=EIGHT,
        frozen=MASK, stacked=("blocks/*",),
    )  # fmt: skip
    moved = jaxcomp.collective_bytes(jax.jit(f).lower(params, X, key=jnp.uint32(1)).compile())
    said = f.link_bytes(PARAMS)["fsdp"]
    empty = {"base": jnp.zeros((0, 64)), "eight": jnp.zeros((0, 8)), "mask": jnp.zeros(0)}
    layers = f.link_bytes({**PARAMS, "head": {**empty, "lora": jnp.zeros((0, 64))}})["fsdp"]
    twice = sum(said) + layers.forward
    assert sum(moved.values()) == pytest.approx(twice + 2 * 7 / 8 * 4, abs=8)
    part = 512 + 8 / 8 * 4  # Elements of a part in 8 bits, and the scale of its bucket.
    assert said.backward == 7 * part * 4
    exact = 7 / 8 * (3 * 64 * 64 + 64 * 64 * 4 + 64 * 8 + 64)
    assert said.forward == exact + 7 * part * 4
    described = str(jaxcomp.describe(f, PARAMS))
    assert described.count("frozen") == 5
    # A rule that names a frozen leaf compresses it.
    rules = (jaxcomp.Rule("head/*", EIGHT),)
    named, _ = sharded({"fsdp": 8}, MASK, weights=jaxcomp.Policy(EIGHT, rules=rules))
    assert named.link_bytes(PARAMS)["fsdp"].forward == said.forward - 7 * (2048 - part)


def test_frozen_leaves_are_named_as_for_freeze():
    named = sharded({"fsdp": 8}, GLOBS)[0].parts.homes(PARAMS)
    assert sum(home.frozen for home in named) == 5
    prefix = {"blocks": MASK["blocks"], "head": False}
    for same in (MASK, lambda params: jax.tree.map(lambda x, m: m, params, MASK)):
        assert sharded({"fsdp": 8}, same)[0].parts.homes(PARAMS) == named
    floats = {**PARAMS, "head": {"lora": PARAMS["head"]["lora"]}}
    assert sum(home.frozen for home in sharded({"fsdp": 8}, prefix)[0].parts.homes(floats)) == 2


@pytest.mark.parametrize(
    ("frozen", "says"),
    [
        (
            (),
            r"got 'blocks/base' of int8: name what is not trained in `frozen`, as in frozen=\('bl",
        ),
        (("bse/*",), "`frozen` must have globs that match leaves, got 'bse/"),
        ({"blocks": True, "haed": False}, "`frozen` must be a tuple of globs .* or a tree"),
        (
            {"blocks": "base", "head": True},
            "`frozen` must be a tuple of globs .* of True and False",
        ),
    ],
)
def test_wrong_masks(frozen, says):
    f, params = sharded({"fsdp": 8}, frozen)
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(f, params, X, key=0)
