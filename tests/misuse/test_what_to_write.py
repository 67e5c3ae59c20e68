"""Errors of everyday mistakes name the mistake and the line to write instead."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jaxcomp
import jaxcomp_command

PARAMS = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
X = jnp.ones((8, 64))


def chain(codec, axis="data"):
    return optax.chain(jaxcomp.compressed_mean(codec, axis), optax.sgd(0.1))


SIGN = chain(jaxcomp.sign())


def stepped(tx, state, mesh):
    """The types of a step's results: nothing is compiled."""

    def step(params, state, x):
        grads = jaxcomp.value_and_grad(lambda p, x: jnp.mean(x @ p["w"] + p["b"]), "data")(
            params, x
        )[1]
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jaxcomp.data_parallel(step, mesh, "data").lower(PARAMS, state, X)


def shapes_of(tx, mesh):
    return jaxcomp.restore_target(tx, PARAMS, mesh, "data")


def four_of(mesh):
    return jax.make_mesh((4,), ("data",), devices=mesh.devices.flat[:4])


def test_the_state_of_eight_workers_on_four(mesh):
    state, words = shapes_of(SIGN, mesh), r"mesh's 4 workers, got that of 8 workers: move it with"
    line = r"state = jaxcomp\.resize_workers\(tx, state, params, workers=4\)"
    with pytest.raises(ValueError, match=f"{words} {line}"):
        jaxcomp.place(state, four_of(mesh), "data")


def test_a_state_of_another_codec_is_grafted_not_resized(mesh):
    line = r"another codec or feedback: jaxcomp\.graft\(tx, state, params, mesh, axis_name\)"
    for codec in (jaxcomp.qsgd_inf(bits=4), jaxcomp.PowerIteration(rank=2)):
        with pytest.raises(ValueError, match=line) as found:
            stepped(chain(codec), shapes_of(SIGN, mesh), mesh)
        assert "resize_workers" not in str(found.value)
    begun = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes_of(SIGN, mesh))
    with pytest.raises(ValueError, match=r"another codec than the state.*jaxcomp\.graft\(tx"):
        jaxcomp.resize_workers(chain(jaxcomp.PowerIteration(rank=2)), begun, PARAMS, 4)


def test_the_metadata_of_a_checkpoint_tell_its_codec(mesh, tmp_path):
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes_of(SIGN, mesh))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", {"state": state})
        checkpointer.wait_until_finished()
        saved = checkpointer.metadata(tmp_path / "state").item_metadata
    same = jaxcomp.restore_target(SIGN, PARAMS, four_of(mesh), "data", workers=saved)
    assert [x.shape for x in jax.tree.leaves(same)] == [x.shape for x in jax.tree.leaves(state)]
    for codec in (jaxcomp.top_k(fraction=0.1), jaxcomp.qsgd_inf(bits=4)):
        with pytest.raises(ValueError, match=r"the codec, feedback.*jaxcomp\.graft\(tx, state"):
            jaxcomp.restore_target(chain(codec), PARAMS, mesh, "data", workers=saved)


def test_shapes_where_arrays_belong(mesh):
    step = jaxcomp.data_parallel(lambda state, x: state, mesh, "data")
    with pytest.raises(ValueError, match=r"of jax\.eval_shape.*jaxcomp\.restore_target\(tx"):
        step(jax.eval_shape(chain(jaxcomp.top_k(fraction=0.1)).init, PARAMS), X)


def test_the_axis_of_the_mean_is_not_the_meshs(mesh):
    dense, sign = (chain(codec, "workers") for codec in (jaxcomp.Dense(), jaxcomp.sign()))
    state = dense.init(PARAMS)
    for run in (
        lambda: stepped(dense, state, mesh),
        lambda: jaxcomp.init_state(sign, PARAMS, mesh, "data"),
    ):
        with pytest.raises(ValueError, match="'workers'") as found:
            run()
        assert "jaxcomp.compressed_mean(codec, 'data')" in "\n".join(found.value.__notes__)


@pytest.mark.wrong_types
def test_a_recipe_that_was_not_called():
    with pytest.raises(
        ValueError, match=r"the function qsgd_inf: call it, as in jaxcomp\.qsgd_inf"
    ):
        jaxcomp.compressed_mean(jaxcomp.qsgd_inf, "data")


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        (jaxcomp, "powersgd", "jaxcomp.PowerIteration(rank=4)"),
        (jaxcomp.algorithms, "PowerSGD", "jaxcomp.PowerIteration(rank=4)"),
        (jaxcomp, "topk", "did you mean jaxcomp.top_k?"),
        (jaxcomp, "diloco", "did you mean jaxcomp.algorithms.diloco?"),
        (jaxcomp.algorithms, "qsgd", "did you mean jaxcomp.qsgd?"),
    ],
)
def test_a_name_that_is_elsewhere(module, name, said):
    with pytest.raises(AttributeError) as found:
        getattr(module, name)
    assert str(found.value).endswith((said, f"{said}, a reducer"))
    with pytest.raises(AttributeError, match=r"no attribute 'nothing_like_it'$"):
        module.nothing_like_it  # noqa: B018


def test_one_is_no_fraction():
    with pytest.raises(ValueError, match=r"integer 1: 1 % of them are 0\.01.*all of them are 1\.0"):
        jaxcomp.top_k(1)
    assert jaxcomp.top_k(fraction=1.0).choice.fraction == 1


def test_a_text_file_is_no_gradient(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("loss 3")
    with pytest.raises(SystemExit):
        jaxcomp_command.main(["fit", str(tmp_path / "notes.txt")])
    said = capsys.readouterr().err
    assert 'as in numpy.savez("early.npz"' in said
    assert "pickle" not in said
