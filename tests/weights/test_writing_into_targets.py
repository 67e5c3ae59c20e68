"""Weights that are copied into arrays of others."""

import numpy as np

from jaxcomp.weights import Publisher
from jaxcomp_weights import Reader


def test_every_target_is_written():
    """A dict that lives for one call may have the address of the one before."""
    url = "memory://tests/targets"
    with Publisher(url) as publisher:
        publisher.publish({"w": np.ones(3, np.float32)}, 0)
    reader = Reader(url)
    for _ in range(20):
        target = np.zeros(3, np.float32)
        reader.update(into={"w": target})
        np.testing.assert_array_equal(target, np.ones(3))


def test_unchanged_leaves_are_not_copied_again():
    url = "memory://tests/targets_unchanged"
    target = {name: np.zeros(3, np.float32) for name in "ab"}
    with Publisher(url) as publisher:
        reader = None
        for step in range(2):
            publisher.publish({"a": np.ones(3, np.float32), "b": np.full(3, step, "f4")}, step)
            publisher.flush()
            reader = reader or Reader(url)
            reader.update(into=target)
            np.testing.assert_array_equal(target["b"], np.full(3, step))
            target["a"][:] = 7
    assert target["a"].tolist() == [7, 7, 7]
