"""Rows of clients in memory and in files, one after another and scattered."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp.federated.table import OnHost

CLIENTS = 12
RUN, SCATTERED, ONE = np.arange(3, 8), np.array([9, 1, 4]), np.array([11])


def row():
    return {
        "residual": np.zeros((7, 3), np.float32),
        "narrow": np.ones(5, jnp.bfloat16),
        "none": np.zeros((0, 4), np.float32),
        "count": np.int32(2),
    }


def rows_of(numbers, filled=0):
    draw = np.random.default_rng(len(numbers))
    count = len(numbers) + filled  # A last block is filled up.
    return {
        "residual": draw.normal(size=(count, 7, 3)).astype(np.float32),
        "narrow": draw.normal(size=(count, 5)).astype(jnp.bfloat16),
        "none": np.zeros((count, 0, 4), np.float32),
        "count": draw.integers(0, 9, count, np.int32),
    }


@pytest.mark.parametrize("where", ["memory", "files"])
@pytest.mark.parametrize("numbers", [RUN, SCATTERED, ONE, RUN[:0]], ids=repr)
def test_rows_that_were_written_are_read_and_no_other_changes(where, numbers, tmp_path):
    table = OnHost(row(), CLIENTS, tmp_path if where == "files" else None)
    new = rows_of(numbers, filled=2)
    table.write(numbers, new)
    for found in (table.read(numbers), table.lend(numbers)):
        for name, rows in found.items():
            np.testing.assert_array_equal(rows, new[name][: len(numbers)], err_msg=name)
    others = np.setdiff1d(np.arange(CLIENTS), numbers)
    for name, rows in table.read(others).items():
        np.testing.assert_array_equal(rows, np.broadcast_to(row()[name], rows.shape))
    if where == "files":
        (file,) = [f for f in tmp_path.iterdir() if f.stat().st_size == CLIENTS * 7 * 3 * 4]
        kept = np.fromfile(file, np.float32).reshape(CLIENTS, 7, 3)
        np.testing.assert_array_equal(kept[numbers], new["residual"][: len(numbers)])


@pytest.mark.parametrize("where", ["memory", "files"])
def test_rows_one_after_another_are_lent_without_a_copy(where, tmp_path):
    table = OnHost(row(), CLIENTS, tmp_path if where == "files" else None)
    lent, read = table.lend(RUN), table.read(RUN)
    table.write(RUN, rows_of(RUN))
    np.testing.assert_array_equal(lent["residual"], rows_of(RUN)["residual"])
    assert not read["residual"].any()
    whole = table.lend(np.arange(CLIENTS))["residual"]
    assert whole.ctypes.data % 64 == 0
