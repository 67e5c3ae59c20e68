"""The step that `local_updates`, `gossip` and federated clients share."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcomp.transforms import worker_round

CENTER = {"w": np.ones((4, 64), jnp.bfloat16)}
ADAM = optax.adam(2.0**-10)


@jax.jit
def stepped(grads, takes):
    """Offset, state and flag of a step, after one that is taken; and the first of both."""
    offset, inner = worker_round.start(CENTER), ADAM.init(CENTER)
    found = []
    for each, own_turn in ((jax.tree.map(jnp.ones_like, CENTER), True), (grads, takes)):
        own = worker_round.here(CENTER, offset)
        turn = jnp.asarray(own_turn)
        offset, inner, taken = worker_round.step(ADAM, each, inner, own, offset, takes=turn)
        found.append((offset, inner, taken))
    return found


@pytest.mark.parametrize(("value", "takes"), [(1.0, True), (np.nan, True), (1.0, False)])
def test_a_step_that_is_not_finite_or_not_the_workers_changes_nothing(value, takes):
    grads = {"w": jnp.full((4, 64), value, jnp.bfloat16)}
    before, after = stepped(grads, takes)
    changes = takes and np.isfinite(value)
    assert bool(before[2])
    assert bool(after[2]) == changes
    leaves = jax.tree.leaves(before[:2]), jax.tree.leaves(after[:2])
    assert changes != all(map(np.array_equal, *leaves))


def test_small_steps_add_up_beside_parameters_that_cannot_hold_them():
    """Below one a bfloat16 moves by 1/256, and a step is 1/1,024."""
    (first, *_), (second, *_) = stepped({"w": jnp.ones((4, 64), jnp.bfloat16)}, True)
    assert first["w"].dtype == jnp.float32
    np.testing.assert_allclose(second["w"], -2.0 * 2.0**-10, rtol=1e-2)
    np.testing.assert_array_equal(worker_round.here(CENTER, first)["w"], CENTER["w"])
    sent = worker_round.delta(second, CENTER)["w"]
    assert sent.dtype == jnp.bfloat16
    np.testing.assert_allclose(sent.astype(np.float32), 2.0**-9, rtol=1e-2)


@pytest.mark.parametrize("mix", [0.0, 0.25])
def test_a_worker_goes_on_between_its_own_parameters_and_the_moved_centre(mix):
    own, moved = np.float32(0.5), np.float32(0.25)
    assert worker_round.resume(mix, own, moved) == mix * (own - moved)
