"""Arrays whose bytes are made when they are read: the same bytes, and no memory before."""

import pickle
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from helpers.nodes import identity  # noqa: F401

from jaxcomp.adapters.flower import arrays, files, raw, records
from jaxcomp_site.packing import packed

HALF = np.array([np.nan, -0.0, 1e30], jnp.bfloat16)
TREE = {
    "half": HALF,
    "empty": np.zeros((0, 3), np.float32),
    "odd": np.arange(7, dtype=np.int8),
    "one": np.float32(1e-45),
    "wide": np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 5),
}
EAGER = records.array(raw.write(TREE), records.MEMORY)


def same(late, eager):
    assert (late.dtype, tuple(late.shape), late.stype, late.data) == (
        eager.dtype, tuple(eager.shape), eager.stype, eager.data
    )  # fmt: skip


def record_of(array):
    record = ArrayRecord()
    record["0"] = array
    return RecordDict({"trees": record})


@pytest.mark.parametrize("name", sorted(TREE))
def test_a_leaf_has_the_bytes_of_flowers_array(name):
    leaf = jnp.asarray(TREE[name])
    same(arrays.Leaf(leaf), Array(np.asarray(leaf)))


def test_a_tree_has_the_bytes_that_are_read_back():
    late = arrays.Tree(TREE, records.MEMORY)
    same(late, EAGER)
    found = raw.read(late.data, raw.like(TREE))
    assert raw.digest(found) == raw.digest(TREE)
    assert raw.like(found) == raw.like(TREE)
    with pytest.raises(ValueError, match="must be the"):
        raw.read(late.data[:-1], raw.like(TREE))


def test_records_and_files_have_the_same_bytes(tmp_path):
    late = record_of(arrays.Tree(TREE, records.MEMORY))
    assert packed(late) == packed(record_of(EAGER))
    memory = files.folder_of(tmp_path)
    files.write(memory, late)
    same(files.read(memory)["trees"]["0"], EAGER)


def test_flower_sends_and_pickles_them_as_its_own():
    tree, leaf = arrays.Tree(TREE, records.MEMORY), arrays.Leaf(jnp.asarray(TREE["wide"]))
    for late, eager in ((tree, EAGER), (leaf, Array(TREE["wide"]))):
        message = Message(record_of(late), dst_node_id=1, message_type="train")
        contents = {id_: one.deflate() for id_, one in get_all_nested_objects(message).items()}
        came = inflate_object_from_contents(message.object_id, contents)
        for found in (came.content["trees"]["0"], pickle.loads(pickle.dumps(late))):
            assert type(found) is Array
            same(found, eager)


def test_a_memory_is_written_a_leaf_at_a_time(tmp_path):
    leaf, leaves = np.ones(2**18, np.float32), 16
    late = record_of(arrays.Tree([leaf + i for i in range(leaves)], records.MEMORY))
    memory = files.folder_of(tmp_path)
    tracemalloc.start()
    try:
        files.write(memory, late)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert leaf.nbytes < peak < 3 * leaf.nbytes
