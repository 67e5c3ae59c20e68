"""The blocks of the pages run unchanged, one after another, in an empty folder."""

import contextlib
import re

import jax
import numpy as np
import pytest
from helpers.paths import ROOT

import jaxcomp

DOCS = ROOT / "docs"
PAGES = (
    "algorithms.md",
    "choose.md",
    "cookbook.md",
    "data_parallel.md",
    "gossip.md",
    "messages.md",
    "multihost.md",
    "multislice.md",
    "own_codec.md",
    "own_feedback.md",
    "own_method.md",
    "own_reducer.md",
    "programs.md",
    "pytorch.md",
    "reducers.md",
    "resume.md",
    "sharded_training.md",
    "weights.md",
)
IMPORTS = "import jax, jax.numpy as jnp, optax, jaxcomp\n"
FRAGMENTS = {
    "algorithms.md": IMPORTS,
    "programs.md": IMPORTS,
    "reducers.md": IMPORTS + "schedule = optax.linear_schedule(0.1, 0.0, 10)\n",
}
"""What a page of lines for a reader's own program takes for granted."""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a page. The tests' devices are the eight that some pages ask for."""
    update = jax.config.update

    def kept(name, value):
        if name != "jax_num_cpu_devices":
            return update(name, value)
        assert value == jax.device_count() == 8
        return None

    monkeypatch.setattr(jax.config, "update", kept)

    def run(page):
        names = {"__name__": page}
        exec(FRAGMENTS.get(page, ""), names)
        with contextlib.chdir(tmp_path):
            for block in blocks(page):
                exec(block, names)
        return names, capsys.readouterr().out

    return run


def blocks(page, language="python"):
    text = (DOCS / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.full
def test_data_parallel(run):
    names, out = run("data_parallel.md")
    (told,) = re.findall(
        r"# (\{'all-reduce': \d+, 'all-to-all': \d+), \.\.\.\}", str(blocks("data_parallel.md"))
    )
    assert told in out
    memory = [leaf.shape for leaf in jax.tree.leaves(names["state"]) if leaf.ndim == 3]
    assert sorted(memory) == [(8, 16, 512), (8, 128, 512)]
    text = (DOCS / "data_parallel.md").read_text()
    assert all(f"`{shape}`" in text for shape in memory)
    assert 0 < float(names["loss"]) < 0.6
    check_private(names)


def check_private(names):
    """The noise of the mean of eight workers with 64 examples each."""

    def mean(params, key, x):
        return jax.lax.pmean(names["private_grads"](params, key, x), "data")

    args = names["params"], jax.random.key(2), names["batch"]
    found = []
    for sigma in (0.5, 0.0):
        names["SIGMA"] = sigma
        step = jaxcomp.data_parallel(mean, names["mesh"], "data")
        found.append(np.concatenate([np.ravel(x) for x in jax.tree.leaves(step(*args))]))
    noise = found[0] - found[1]
    np.testing.assert_allclose(noise.std(), 0.5 / 64 / 8**0.5, rtol=6 / noise.size**0.5)
    assert np.linalg.norm(found[1]) <= 1


@pytest.mark.full
def test_multihost(run, tmp_path):
    names, _ = run("multihost.md")
    assert names["losses"][-1] < names["losses"][0] / 1.5
    trained = np.load(tmp_path / "trained.npz")
    np.testing.assert_array_equal(trained["in"], names["params"]["in"])


@pytest.mark.full
def test_resume(run):
    """On as many workers, on fewer, and with another codec the loss goes on falling."""
    _, out = run("resume.md")
    losses = re.findall(r"^(linen|nnx), (\d) workers.*: (\S+) after (\S+)$", out, re.MULTILINE)
    assert [line[:2] for line in losses] == [(f, n) for f in ("linen", "nnx") for n in "848"]
    assert all(float(again) < float(before) for *_, again, before in losses)


@pytest.mark.full
def test_own_codec(run):
    """Every output that the page shows is printed; the codec is that of `examples/own_codec.py`."""
    names, out = run("own_codec.md")
    shown = blocks("own_codec.md", "text")
    assert len(shown) == 2
    assert all(said.strip() in out for said in shown)
    assert "Dithered(bucket_size=256) passes" in out
    assert float(names["loss"]) < 1
    example = (ROOT / "examples" / "own_codec.py").read_text()
    (codec,) = re.findall(r"^@dataclasses.*?\n(?=\n\n)", example, flags=re.DOTALL | re.MULTILINE)
    assert codec in (DOCS / "own_codec.md").read_text()


@pytest.mark.parametrize("part", ["feedback", "method", "reducer"])
def test_other_parts_of_ones_own(run, part):
    """Their checks pass in the blocks of the pages."""
    names, _ = run(f"own_{part}.md")
    assert callable(names["scaffold"]) if part == "method" else names["mean"].update


def test_messages_of_the_checks_are_those_of_the_page():
    table = (DOCS / "own_codec.md").read_text().partition("\n## The codec\n")[0]
    rows = re.findall(r"^\| `(.*?)` \|", table, flags=re.MULTILINE)
    sources = (ROOT / "jaxcomp" / "testing").glob("*.py")
    said = re.sub(r'"\s*f?"', "", "".join(path.read_text() for path in sources))
    starts = [re.split(r" (?:bfloat16|nan|8 bits|for zeros)", row)[0] for row in rows]
    assert len(starts) == 6
    assert [start for start in starts if start not in said] == []


@pytest.mark.full
def test_pytorch(run):
    names, out = run("pytorch.md")
    assert float(re.search(r"loss ([\d.]+)", out)[1]) < 0.6
    assert any(4 in leaf.shape for leaf in jax.tree.leaves(names["state"]))  # Factors of rank 4.


@pytest.mark.full
def test_blocks_of_sharded_training(run):
    """Every output that the page shows is printed, and every way to shard makes the same model."""
    names, out = run("sharded_training.md")
    shown = blocks("sharded_training.md", "text")
    assert len(shown) == 3
    assert [said for said in shown if said not in out] == []
    params, x = jax.device_get((names["params"], names["x"]))
    mapped, _ = jax.jit(names["mapped"])(params, 0, x)
    sharded, _ = names["loss_and_grad"](params, x, key=0)
    dense = jax.jit(names["loss_fn"])(params, x)
    np.testing.assert_allclose([mapped, sharded], dense, rtol=0.05)
    for made, name in (("of_linen", "linen"), ("of_nnx", "of_blocks")):
        loss, grads = names[name](names[made], x, key=1)
        assert np.isfinite(loss)
        assert jax.tree.structure(grads) == jax.tree.structure(names[made])
    up, down = (params["blocks"][name][0] for name in ("up", "down"))
    np.testing.assert_allclose(names["y"], x + np.maximum(x @ up, 0) @ down, atol=0.1)
    tokens = np.random.default_rng(0).normal(size=(8, 64, 128)).astype(np.float32)
    for name, axis, numbers in (("experts", "experts", (0,)), ("tick", "stages", (0, 0))):

        def send(t, f=names[name], numbers=numbers):
            return f(t, jax.numpy.negative, *numbers)

        moved = jax.jit(jax.vmap(send, axis_name=axis))(tokens)
        want = -tokens if name == "experts" else -np.roll(tokens, 1, 0)
        # The largest element of a block may be clipped.
        np.testing.assert_allclose(moved[1:], want[1:], rtol=0.13, atol=0.05)


def test_gossip(run):
    names, _ = run("gossip.md")
    assert np.isfinite(jax.tree.leaves(names["model"])[0]).all()


def test_messages(run):
    names, _ = run("messages.md")
    again = jaxcomp.to_bytes(names["codec"], names["payload"], names["like"])
    assert again == names["data"]


@pytest.mark.full
def test_weights(run):
    """The output of the page is printed, and the part of the weights is theirs."""
    names, out = run("weights.md")
    (shown,) = (text for text in blocks("weights.md", "text") if "bfloat16 (" in text)
    assert shown in out
    whole, part = names["reader"].update()[0], names["weights"]
    np.testing.assert_array_equal(part["layer/w"], whole["layer/w"][:, :32])
    np.testing.assert_array_equal(names["held"]["layer/b"], whole["layer/b"])


@pytest.mark.parametrize("page", ["algorithms.md", "choose.md", "reducers.md"])
def test_fragments(run, page):
    """Lines for a reader's own program make what the page says."""
    names, _ = run(page)
    if "policy" in names:
        assert names["policy"].rules[1].codec is None
    else:
        names["tx"].init({"w": np.ones((64, 64), np.float32)})
