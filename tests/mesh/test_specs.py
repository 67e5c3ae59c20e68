"""Trees of specs, with and without the variables of nnx."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.sharding import EF_SIGN, make_mesh
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxcomp
from jaxcomp.mesh import specs as specs_

MESH = {"dcn": 2, "fsdp": 4}


class Block(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        into, out = (nnx.with_partitioning(init, names) for names in ((None, "fsdp"), ("fsdp",)))
        self.up = nnx.Linear(64, 128, use_bias=False, rngs=rngs, kernel_init=into)
        self.down = nnx.List([nnx.Linear(128, 64, rngs=rngs, kernel_init=out)])

    def __call__(self, x):
        return self.down[0](jax.nn.relu(self.up(x)))


def pure(state):
    """As `nnx.pure`, which some versions call `nnx.as_pure`."""
    kind = nnx.Variable
    return jax.tree.map(lambda v: v.get_value(), state, is_leaf=lambda node: isinstance(node, kind))


@pytest.fixture(scope="module")
def model():
    mesh = make_mesh(MESH)
    with jax.set_mesh(mesh):
        graph, state = nnx.split(Block(nnx.Rngs(0)), nnx.Param)
    specs = nnx.get_partition_spec(state)
    params = {
        "variables": state,
        "state": pure(state),
        "dictionary": nnx.to_pure_dict(state),
    }
    given = {
        "variables": specs,
        "shardings": nnx.get_named_sharding(state, mesh),
        "state": pure(specs),
        "dictionary": nnx.to_pure_dict(specs),
    }
    return mesh, graph, params, given


PAIRS = list(
    itertools.product(
        ("variables", "shardings", "state", "dictionary"), ("variables", "state", "dictionary")
    )
)


@pytest.mark.parametrize(("of_specs", "of_params"), PAIRS)
def test_variables_may_be_around_specs_and_parameters(of_specs, of_params, model):
    _, _, params, given = model
    like = params[of_params]
    found = specs_.spread("specs", given[of_specs], like)
    assert jax.tree.structure(found) == jax.tree.structure(like)
    assert jax.tree.leaves(found) == [P(), P("fsdp"), P(None, "fsdp")]


def test_a_prefix_of_variables(model):
    _, _, params, given = model
    for like in params.values():
        assert set(jax.tree.leaves(specs_.spread("specs", P("fsdp"), like))) == {P("fsdp")}
    part = {"up": nnx.Param(P(None, "fsdp")), "down": None}
    found = specs_.spread("specs", part, params["dictionary"])
    assert jax.tree.leaves(found) == [P(), P(), P(None, "fsdp")]
    for wrong in ({"up": given["state"]["up"]}, {"other": P()}):
        with pytest.raises(ValueError, match="`specs` must be a tree of PartitionSpecs like the"):
            specs_.spread("specs", wrong, params["state"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("of_specs", "of_params"), [("variables", "state"), ("state", "variables")]
)
def test_a_step_with_variables_on_one_side(of_specs, of_params, model):
    """`param_specs` and `specs` of both kinds give the bits of pure trees."""
    mesh, graph, params, given = model
    x = jnp.ones((16, 64))

    def loss(params, x):
        return (nnx.merge(graph, params)(x) ** 2).mean()

    def train(specs, params):
        tx = optax.chain(
            jaxcomp.compressed_mean(jaxcomp.Gather(EF_SIGN), "dcn", key=1, param_specs=specs),
            optax.sgd(0.1),
        )

        def step(params, state, x):
            grads = jax.grad(loss)(jaxcomp.local(params, "dcn"), x)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        state = jaxcomp.init_state(tx, params, mesh, "dcn")
        run = jaxcomp.data_parallel(step, mesh, "dcn")
        for _ in range(2):
            params, state = run(params, state, x)
        return jax.tree.leaves(params)

    def gradients(specs, params):
        over = jax.tree.map(
            lambda spec: P(*spec, *(("dcn",) if spec == P("fsdp") else ())),
            specs,
            is_leaf=specs_.is_partition,
        )
        f = jaxcomp.fully_sharded(loss, mesh, ("dcn", "fsdp"), over, weights=None)
        laid = jax.device_put(
            params,
            jax.tree.map(
                lambda spec: NamedSharding(mesh, spec), specs_.spread("specs", over, params)
            ),
        )
        return jax.tree.leaves(jax.jit(f)(laid, x, key=0))

    for run in (train, gradients):
        found = run(given[of_specs], params[of_params])
        want = run(given["state"], params["state"])
        for one, other in zip(found, want, strict=True):
            np.testing.assert_array_equal(one, other)
