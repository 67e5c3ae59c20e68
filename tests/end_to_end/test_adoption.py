"""Programs of other projects, dense and compressed: few lines change, and the loss is equal."""

import difflib

import jax
import numpy as np
import pytest
from helpers.paths import ROOT
from helpers.suite import few_or_all

FOLDER = ROOT / "examples" / "adoption"
LINES = {
    "equinox_parallelism": 10,  # A plain `jit` with shardings.
    "flax_mnist_nnx": 6,
    "flax_nlp_seq": 6,
    "haiku_transformer": 6,
    "jax_shard_map": 6,
    "jax_spmd_mnist": 6,
}


def lines(name, kind):
    """Those of a program, without its docstring and empty ones."""
    _, _, program = (FOLDER / name / f"{kind}.py").read_text().split('"""', 2)
    return [line for line in program.splitlines() if line.strip()]


def changed(name):
    """The lines of the compressed program that the dense one does not have."""
    found = difflib.ndiff(lines(name, "dense"), lines(name, "compressed"))
    return [line for line in found if line.startswith("+ ")]


def run(name, kind):
    path = FOLDER / name / f"{kind}.py"
    names = {"__name__": "__main__"}
    exec(compile(path.read_text(), path, "exec"), names)
    return names


def test_every_program_is_here():
    assert {path.parent.name for path in FOLDER.glob("*/dense.py")} == set(LINES)


@pytest.mark.parametrize("name", LINES)
def test_few_lines_change(name):
    assert len(changed(name)) <= LINES[name], "\n".join(changed(name))


FEW = [name for name in LINES if name != "flax_nlp_seq"]  # `test_frameworks` trains linen too.


@pytest.mark.full
@pytest.mark.parametrize("name", few_or_all(FEW, LINES))
def test_the_loss_is_that_of_dense(name):
    dense, compressed = run(name, "dense"), run(name, "compressed")
    np.testing.assert_allclose(compressed["final_loss"], dense["final_loss"], rtol=0.05)
    if name != "flax_mnist_nnx":
        return
    assert abs(compressed["accuracy"] - dense["accuracy"]) < 0.03
    for names in (dense, compressed):
        model = names["model"]
        assert int(model.dropout1.rngs.count[...]) == names["train_steps"]
        assert float(abs(model.batch_norm1.mean[...]).max()) > 0.1
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0.2, atol=0.05),
        *(names["model"].batch_norm1.var[...] for names in (dense, compressed)),
    )
