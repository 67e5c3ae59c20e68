"""Boxes of flax, and parameters from a loop of `jax.pmap`."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen

import jaxcomp
from jaxcomp.mesh import per_worker

X = jnp.ones((32, 32))
BOXED = {
    "accumulate": (
        jaxcomp.accumulate(
            optax.chain(
                jaxcomp.per_worker(optax.trace(0.9)),
                jaxcomp.compressed_mean(jaxcomp.sign(), "data"),
                optax.adam(0.1),
            ),
            "data",
            every=2,
        ),
        2,
    ),
    "local updates": (jaxcomp.local_updates(optax.adam(0.1), None, "data", every=2), 3),
    "gossip": (jaxcomp.gossip(optax.sgd(0.1), jaxcomp.qsgd(bits=4), "data"), 1),
}
"""Transformations, and how many trees of memory of the parameters' shape they have."""


@pytest.mark.parametrize("name", BOXED)
def test_boxes_of_flax_name_all_dimensions(name, mesh):
    """Also that of the workers, so that specs made from them fit; other boxes stay as they were."""
    (tx, memories), box = BOXED[name], linen.LogicallyPartitioned
    params = {"w": box(jnp.ones((4, 256)), ("embed", "mlp")), "b": jnp.ones(256)}

    def train(params, state, x):
        def loss(params):
            return jnp.mean((x @ params["w"].value + params["b"]) ** 2)

        own = jaxcomp.local(jaxcomp.view(params, state), "data")
        updates, state = tx.update(jax.grad(loss)(own), state, params)
        return optax.apply_updates(params, updates), state

    state = jaxcomp.init_state(tx, params, mesh, "data")
    step = jaxcomp.data_parallel(train, mesh, "data")
    after = jax.eval_shape(step, params, state, jnp.ones((8, 4)))
    assert jax.tree.structure(after) == jax.tree.structure((params, state))
    leaves = jax.tree_util.tree_leaves_with_path(
        after[1], is_leaf=lambda node: isinstance(node, box)
    )
    boxes = [(per_worker.marked(path), node) for path, node in leaves if isinstance(node, box)]
    for memory, node in boxes:
        if node.value is not None:
            names = ("embed", "mlp")
            assert node.names == ((None, *names) if memory else names)
            assert len(node.names) == node.value.ndim
    assert sum(memory for memory, _ in boxes) == memories


def test_parameters_that_are_still_replicated(mesh):
    """With an axis of devices, as `flax.jax_utils.replicate` makes them for `jax.pmap`."""
    model = linen.Dense(4)
    params = jax.tree.map(lambda p: jnp.stack([p] * 8), model.init(jax.random.key(0), X))

    def step(params, x):
        return jax.lax.pmean(model.apply(params, x).mean(), "data")

    with pytest.raises(Exception, match="it received has shape") as caught:
        jaxcomp.data_parallel(step, mesh, "data")(params, X)
    assert "leave out flax.jax_utils.replicate" in str(caught.value.__notes__)
