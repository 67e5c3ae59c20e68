"""What a first-time user gets wrong raises an error that says what would work."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import collectives as c

EIGHT = jaxcomp.qsgd_inf(bits=8)
X = jnp.ones((4, 8, 64))
RESIDUAL = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual())


def over(f, x=X):
    return jax.vmap(f, axis_name="data")(x)


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: c.all_gather(x, "model", EIGHT, key=0), "`axis_name` must be an axis of the"),
        (lambda x: c.all_gather(x, "data", EIGHT), "`key` must be the number of the step"),
        (lambda x: c.psum(x, "data", EIGHT, key=0.5), "`key` must be an integer seed"),
        (lambda x: c.all_gather(x, "data", RESIDUAL, key=0), "a collective has no memory"),
        (lambda x: c.psum(x, "data", jaxcomp.Dense(), key=0), "a collective has no memory"),
        (lambda x: c.psum(x, "data", "int8", key=0), "None to send dense, got 'int8'"),
        (
            lambda x: c.psum_scatter(x, "data", jaxcomp.terngrad(shared=True), key=0),
            "must not need the workers to agree",
        ),
        (
            lambda x: c.all_gather(x, "data", EIGHT, key=0, back=jaxcomp.Dense),
            "`back` must be a codec such as",
        ),
        (
            lambda x: c.all_gather(x, "data", jaxcomp.alq(), key=0),
            "must not need the workers to agree|no memory from step to step",
        ),
        (
            lambda x: c.all_gather({"ids": x.astype(int)}, "data", EIGHT, key=0),
            "'ids' of int32: send it by jax.lax.all_gather",
        ),
        (
            lambda x: c.psum_scatter({"w": x}, "data", EIGHT, key=0, scatter_dimension=2),
            "`scatter_dimension` must be a dimension of every leaf, got 2 for 'w' of 2 dimensions",
        ),
        (
            lambda x: c.psum_scatter({"w": x[:7]}, "data", EIGHT, key=0),
            r"divisible by the number of workers, 4, got 0 for 'w' of shape \(7, 64\)",
        ),
        (
            lambda x: c.psum_scatter(x, "data", EIGHT, key=0, tiled=False),
            "a dimension as long as the number of workers, 4",
        ),
        (
            lambda x: c.all_to_all(x, "data", EIGHT, key=0, split_axis=0, concat_axis=5),
            "`concat_axis` must be a dimension of every leaf",
        ),
        (
            lambda x: c.ppermute(x, "data", EIGHT, key=0, perm=[(0, 1), (2, 1)]),
            "`perm` must be pairs of a sender and its receiver among 4 workers",
        ),
        (
            lambda x: c.ppermute(x, "data", EIGHT, key=0, perm=[(0, 1, 2)]),
            "`perm` must be pairs of a sender and its receiver among 4 workers",
        ),
        (
            lambda x: c.ppermute(x, "data", EIGHT, key=0, perm=[(0, 4)]),
            "`perm` must be pairs of a sender and its receiver among 4 workers",
        ),
        (lambda x: c.all_gather(x, "data", EIGHT, key=0, site=0.5), "`site` must be a number or a"),
    ],
)
def test_wrong_arguments_of_collectives(call, says):
    with pytest.raises(ValueError, match=says):
        over(call)


@pytest.mark.wrong_types
def test_wrong_calls_of_wire_bytes():
    like = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    for call, says in (
        (lambda: c.wire_bytes(jax.lax.psum, like, EIGHT, 4), "`collective` must be one of"),
        (lambda: c.wire_bytes(c.psum, like, EIGHT, 0), "`workers` must be at least 1"),
        (lambda: c.wire_bytes(c.psum, like, EIGHT, 4, axis=1), "`axis` must be None for psum"),
        (lambda: c.wire_bytes(c.ppermute, like, EIGHT, 4), "`perm` must be given"),
    ):
        with pytest.raises(ValueError, match=says):
            call()


UNTYPED_KEYS = {
    "the index": {"key": lambda: lax.axis_index("data")},
    "folded": {"key": lambda: jax.random.fold_in(jax.random.key(0), lax.axis_index("data"))},
    "a site": {"key": lambda: 0, "site": lambda: ("layer", lax.axis_index("data"))},
}


@pytest.mark.parametrize("name", UNTYPED_KEYS)
def test_keys_that_differ_are_found_without_types(name, mesh):
    """With `eden`, which decodes by the key, the sum would be noise."""

    def f(x):
        given = {name: make() for name, make in UNTYPED_KEYS[name].items()}
        return c.psum(x, "data", jaxcomp.eden(), **given)

    whole = jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    for run in (whole, jax.vmap(f, axis_name="data")):
        with pytest.raises(ValueError, match="`key` and `site` must be the same on all workers"):
            jax.eval_shape(run, jnp.ones((8, 64)))


def test_keys_of_members_of_an_ensemble_may_differ():
    """But not those that `jax.vmap` maps over the workers."""

    def f(x, key):
        return c.psum(x, "data", EIGHT, key=key)

    keys, x = jnp.arange(3), jnp.ones((4, 8, 64))
    members = jax.vmap(jax.vmap(f, (0, None), axis_name="data"), (None, 0))
    assert jax.eval_shape(members, x, keys).shape == (3, 4, 8, 64)
    with pytest.raises(ValueError, match="`key` and `site` must be the same on all workers"):
        jax.eval_shape(jax.vmap(f, axis_name="data"), x, jnp.arange(4))


@pytest.mark.parametrize("checked", [True, False])
def test_axes_of_devices_and_of_vmap_are_apart(checked):
    mesh = jax.make_mesh(
        (4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4]
    )

    def f(x):
        return c.psum(x, ("a", "lane"), EIGHT, key=0)

    lanes = jax.vmap(f, axis_name="lane")
    whole = jax.shard_map(lanes, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=checked)
    with pytest.raises(ValueError, match="call it over these first, then over 'a'"):
        jax.eval_shape(whole, jnp.ones((8, 64)))


def test_automatic_axes_beside_are_no_surprise(two, recwarn):
    calls = {
        "psum": (c.psum, {}),
        "pmean": (c.pmean, {}),
        "pvary": (c.pvary, {}),
        "all_gather": (c.all_gather, {}),
        "psum_scatter": (c.psum_scatter, {}),
        "all_to_all": (c.all_to_all, {"split_axis": 0, "concat_axis": 0}),
        "ppermute": (c.ppermute, {"perm": [(0, 1)]}),
    }

    def run(codec, call, settings, **mapping):
        specs = P() if call is c.pvary else P("dcn")

        def f(x):
            return call(x, "dcn", codec, key=0, **settings)

        whole = jax.shard_map(f, mesh=two, in_specs=specs, out_specs=P("dcn"), **mapping)
        jax.eval_shape(jax.jit(whole), jnp.ones((8, 64)))

    for call, settings in calls.values():
        run(None, call, settings, axis_names={"dcn"}, check_vma=False)
        run(EIGHT, call, settings, check_vma=False)
        assert not recwarn.list
    for call, settings in calls.values():
        with pytest.warns(UserWarning, match=r"automatic axes \('fsdp',\) beside 'dcn': arrays"):
            run(EIGHT, call, settings, axis_names={"dcn"}, check_vma=False)


def test_types_find_what_is_summed_already_and_what_differs_already(mesh):
    def typed(f, spec):
        whole = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=P())
        return jax.eval_shape(whole, jnp.ones((8, 64)))

    with pytest.raises(ValueError, match="it is a sum already"):
        typed(lambda x: c.psum(x, "data", EIGHT, key=0), P())
    with pytest.raises(ValueError, match="which differs between them already"):
        typed(lambda x: c.pvary(x, "data", EIGHT, key=0), P("data"))
    for settings in (
        {"key": jax.lax.axis_index},
        {"key": lambda name: 0, "site": jax.lax.axis_index},
    ):

        def drawn(x, settings=settings):
            return c.psum(x, "data", EIGHT, **{k: f("data") for k, f in settings.items()})

        with pytest.raises(ValueError, match="`key` and `site` must be the same on all workers"):
            typed(drawn, P("data"))
    two = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def partly(x):
        return c.all_gather(x, ("a", "b"), EIGHT, key=jax.lax.axis_index("a"))

    spec = P(("a", "b"))
    whole = jax.shard_map(partly, mesh=two, in_specs=spec, out_specs=spec)
    with pytest.raises(ValueError, match="`key` and `site` must be the same on all workers"):
        jax.eval_shape(whole, jnp.ones((8, 64)))
