"""Memory of one codec is restored for another where it means the same, and else refused by name."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from helpers.suite import CODECS

import jaxcomp
from jaxcomp.exchange import state as state_
from jaxcomp.exchange.plan import Plan

SHAPES = {
    **dict.fromkeys("abcd", (16, 32)),
    **dict.fromkeys(("long", "other"), (1024,)),
    **dict.fromkeys(("short", "shorter"), (7,)),
}
LIKE = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
FEEDBACKS = (
    jaxcomp.Residual(),
    jaxcomp.Residual(decay=0.9),
    jaxcomp.Residual(dtype="bfloat16"),
    jaxcomp.MomentumCorrection(),
    jaxcomp.Shift(),
)
GLOBS = (None, "a", "[ab]", "[ac]", "[bd]", "long", "other", "short", "*")
PAIR = (jaxcomp.natural(), jaxcomp.qsgd_inf(bits=4))


def policy(glob, first, second):
    rules = () if glob is None else (jaxcomp.Rule(glob, second),)
    return jaxcomp.Policy(first, rules=rules, min_size=0, min_ndim=0)


def links():
    policies = [policy(None, codec, None) for codec in CODECS]
    policies += [policy(glob, *pair) for glob in GLOBS[1:] for pair in (PAIR, PAIR[::-1])]
    policies += [policy(glob, PAIR[1], None) for glob in GLOBS[1:-1]]
    for one in policies:
        for feedback in FEEDBACKS:
            try:
                yield jaxcomp.Link(one, feedback)
            except ValueError:  # Not every codec goes with every feedback.
                continue


def arrangement(plan):
    """Which element of which leaf is where in the memory."""
    return [(b.size, b.slices, b.segments, b.pieces) for b in plan.layout.batches]


@pytest.mark.filterwarnings("ignore:.*(is biased|not known to be contractive).*:UserWarning")
def test_memories_that_cannot_be_told_apart_mean_the_same():
    """Of every recipe and feedback, and of rules: the same names and shapes, the same places."""
    alike = collections.defaultdict(list)
    for link in links():
        plan = Plan.of(jaxcomp.Gather(link), LIKE, "data", (2,))
        try:
            held = jax.eval_shape(lambda plan=plan: state_.init(plan).feedback)
        except ValueError:
            continue
        flat = jax.tree_util.tree_leaves_with_path(held)
        names = [(jax.tree_util.keystr(path), x.shape, x.dtype.name) for path, x in flat]
        alike[tuple(names)].append((type(link.feedback), arrangement(plan), link))
    pairs = 0
    for several in alike.values():
        (feedback, places, link), *others = several
        for other_feedback, other_places, other in others:
            assert feedback is other_feedback, (link, other)
            assert places == other_places, (link, other)
            pairs += 1
    assert pairs > 30
    assert len(alike) > 30


def transformation(glob, feedback=jaxcomp.Residual(), pair=PAIR):
    link = jaxcomp.Link(policy(glob, *pair), feedback)
    return jaxcomp.compressed_mean(jaxcomp.Gather(link), "data", key=5)


def stepped(tx, mesh):
    step = jaxcomp.data_parallel(lambda state, grads: tx.update(grads, state), mesh, "data")
    return lambda state, grads: step(state, grads)[1]


def test_memory_of_other_rules_is_refused_by_name(tmp_path):
    """The shapes are the same; the residual of one matrix would be added to another one."""
    mesh = jax.make_mesh((1,), ("data",))
    params = {name: jnp.ones(SHAPES[name]) for name in "abcd"}
    one, other = (transformation(glob) for glob in ("[ac]", "[ab]"))
    state, target = (jaxcomp.init_state(tx, params, mesh, "data") for tx in (one, other))
    shapes = [[x.shape for x in jax.tree.leaves(tree)] for tree in (state, target)]
    assert shapes[0] == shapes[1]
    stored = state.memory.feedback.stored, target.memory.feedback.stored
    saved = serialization.to_bytes(state)
    both = f"{stored[1]}.*{stored[0]}"
    with pytest.raises(ValueError, match=f"`state` must hold '{both}"):
        serialization.from_bytes(target, saved)
    with pytest.raises(ValueError, match=f"`state` must have the memory '{both}.*rules of another"):
        stepped(other, mesh)(state, params)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
        saver.wait_until_finished()
        with pytest.raises(ValueError, match=f"(?s){stored[0]}.*{stored[1]}"):
            saver.restore(tmp_path / "state", target)
        back = saver.restore(tmp_path / "state", state)
    assert jax.tree.structure(back) == jax.tree.structure(state)


def test_a_residual_goes_on_with_another_codec():
    """It is the unsent part of the gradients, of which the next codec sends a part."""
    mesh = jax.make_mesh((1,), ("data",))
    params = {name: jnp.ones(SHAPES[name]) for name in "abcd"}
    draw = np.random.default_rng(0)
    grads = {name: draw.normal(size=(1, *SHAPES[name])).astype(np.float32) for name in "abcd"}
    one = transformation(None)
    other = transformation(None, jaxcomp.Residual(decay=0.9), PAIR[::-1])
    states = [jaxcomp.init_state(tx, params, mesh, "data") for tx in (one, other)]
    held = jaxcomp.data_parallel(
        lambda state, grads: one.update(jax.tree.map(lambda g: g[0], grads), state)[1], mesh, "data"
    )(states[0], grads)
    moved = serialization.from_bytes(states[1], serialization.to_bytes(held))
    mean, left = jaxcomp.data_parallel(
        lambda state, grads: other.update(jax.tree.map(lambda g: 0 * g[0], grads), state),
        mesh,
        "data",
    )(moved, grads)
    (before,), (after,) = held.memory.feedback.tree.residual, left.memory.feedback.tree.residual
    assert np.abs(before).max() > 0
    sent = np.concatenate([np.ravel(mean[name]) for name in "abcd"])
    np.testing.assert_allclose(np.ravel(after), 0.9 * (np.ravel(before) - sent), atol=1e-6)
