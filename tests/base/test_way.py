"""The way of a gradient: the page about it is true, and it stays short."""

import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from helpers.paths import ROOT

import jaxcomp

PACKAGE = pathlib.Path(jaxcomp.__file__).parent
PARAMS = {"w": jnp.zeros((64, 64)), "b": jnp.zeros(64)}
CODEC = jaxcomp.qsgd_inf(bits=4)


def calls_of(run):
    """The functions of the package that a warm trace calls, as pairs of a file and a name.

    Comprehensions and lambdas are no functions that a reader jumps to. Adapters take part where
    their framework is imported.
    """
    for _ in range(2):
        run()
    jax.clear_caches()
    found = []

    def note(frame, event, arg):
        del arg
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if event != "call" or name.startswith("<") or not path.startswith(f"{PACKAGE}/"):
            return
        path = path.removeprefix(f"{PACKAGE}/")
        if not path.startswith("adapters/") and path != "base/adapter.py":
            found.append((path, name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found


def mean():
    tx = jaxcomp.compressed_mean(CODEC, "data")
    grads = jax.tree.map(lambda x: jnp.ones((2, *x.shape)), PARAMS)
    state = jax.vmap(lambda _: tx.init(PARAMS), axis_name="data")(jnp.arange(2))

    def step(grads, state):
        return jax.vmap(lambda g, s: tx.update(g, s, PARAMS), axis_name="data")(grads, state)

    return lambda: jax.make_jaxpr(step)(grads, state)


def sharded():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    specs = {"w": jax.P("data"), "b": jax.P()}

    def loss(params, x):
        return jnp.mean((x @ params["w"] + params["b"]) ** 2)

    step = jaxcomp.fully_sharded(loss, mesh, "data", specs, weights=CODEC, gradients=CODEC)
    return lambda: jax.make_jaxpr(lambda p, x: step(p, x, key=0))(PARAMS, jnp.ones((4, 64)))


def until_encoded(calls, begin):
    """The calls from a function on until the first codec encodes."""
    names = [name for _, name in calls]
    encoded = next(i for i, one in enumerate(calls) if one[0].startswith("codecs/"))
    return calls[names.index(begin) : encoded]


def rooms(calls):
    return [path.split("/")[0] for path, _ in calls]


@pytest.fixture(scope="module")
def way():
    return calls_of(mean())


def test_the_page_follows_a_gradient(way):
    """The functions of the page call each other in its order."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `(\S+\.py)` \| `(\w+)` \| ", page, flags=re.MULTILINE)
    assert 8 <= len(rows) <= 10
    at = -1
    for row in rows:
        assert row in way[at + 1 :], row
        at = way.index(row, at + 1)


def test_the_way_to_the_codec_is_short(way):
    before = until_encoded(way, "update_fn")
    assert len(set(before)) <= 62
    assert len({path for path, _ in before}) <= 22
    changes = [one for one, other in zip(rooms(way), rooms(way)[1:], strict=False) if one != other]
    assert len(changes) <= 145


def test_the_way_of_a_sharded_weight_is_short():
    before = until_encoded(calls_of(sharded()), "__call__")
    assert len(set(before)) <= 92
