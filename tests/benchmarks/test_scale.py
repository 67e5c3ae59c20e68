"""`benchmarks/scale.py` at a thousandth of its size: 83 thousand parameters, a short text."""

import dataclasses
import itertools
import json
import time

import numpy as np
import pytest
from helpers.paths import ROOT

SETTINGS = {
    "layers": 2, "width": 48, "head": 16, "context": 32, "windows": 2, "steps": 8, "every": 4,
    "rate": 3e-3, "warm": 2, "seed": 0, "attention": "xla", "parameters": 80_112,
}  # fmt: skip


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")  # As `reporting`, perhaps imported before.
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


@pytest.fixture
def toy():
    """A call whose clock does not end it."""
    import byte_lm_model
    import scale

    files = sorted((ROOT / "jaxcomp" / "bits").glob("*.py"))
    train, held_out = (b"\0".join(path.read_bytes() for path in files[at::2]) for at in (0, 1))
    text = byte_lm_model.Text(
        np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8), "toy"
    )
    until = time.monotonic() + 600
    return scale.Run(settings=SETTINGS, text=text, now=time.monotonic, until=until)


def test_a_call_after_a_kill_skips_finished_methods(toy, tmp_path, monkeypatch):
    import scale

    def measure(names):
        for done in scale.measure(names, toy, scale.previous(tmp_path, toy.settings)):
            scale.write(toy, done, tmp_path)

    def killed(task):
        raise KeyboardInterrupt

    names = ["dense", "qsgd_inf 4-bit"]
    with monkeypatch.context() as kill:
        kill.setitem(scale.methods.METHODS, "qsgd_inf 4-bit", killed)
        with pytest.raises(KeyboardInterrupt):
            measure(names)
    first = json.loads((tmp_path / "scale.json").read_text())["methods"]
    assert list(first) == ["dense"]
    assert first["dense"]["finished"]
    monkeypatch.setitem(scale.methods.METHODS, "dense", killed)  # Run again, it would raise.
    measure(names)
    found = json.loads((tmp_path / "scale.json").read_text())["methods"]
    assert found["dense"] == first["dense"]
    for record in found.values():
        assert [point[0] for point in record["curve"]] == [0, 4, 8]
        assert record["curve"][-1][3] < record["curve"][0][3] - 0.1  # Bits per byte.
    sent = {name: record["sent"] for name, record in found.items()}
    assert 6 < sent["dense"] / sent["qsgd_inf 4-bit"] < 16  # Small leaves are sent dense.
    assert (tmp_path / "scale.png").stat().st_size > 20_000
    with pytest.raises(SystemExit, match="other settings"):
        scale.previous(tmp_path, {**toy.settings, "steps": 9})


def test_the_clock_ends_a_method_in_time(toy, monkeypatch):
    """Steps of ten seconds, scores of thirty: a step begins if it and a score fit."""
    import scale

    seconds = itertools.count()
    clock = [0.0]
    monkeypatch.setattr(scale, "Trainer", lambda way, run: Slow(clock))
    run = dataclasses.replace(
        toy, settings={**SETTINGS, "steps": 100}, now=lambda: clock[0], until=200.0
    )

    def score(params):
        clock[0] += 30
        return 8.0 - next(seconds)

    found = scale.train("dense", run, score, 200.0)
    # 30 for the score before the first step, then 4 steps and a score, and again; two more steps.
    assert [point[0] for point in found["curve"]] == [0, 4, 8]
    assert not found["finished"]
    assert clock[0] == 170
    assert found["tokens_per_second"] == pytest.approx(8 * 2 * 32 / 10)


class Slow:
    """A compiled method whose steps take ten seconds."""

    carried, compile_s = ({},), 0.0

    def __init__(self, clock):
        self.clock = clock

    def take(self, number, batch):
        self.clock[0] += 10

    def peak(self):
        return 1


def test_methods_share_the_time_that_is_left(toy, monkeypatch):
    """A method that fails, or ends early, leaves its time to those after it."""
    import scale

    clock, given = [0.0], {}

    def train(name, run, score, until):
        given[name] = until - clock[0]
        if name == "eden 1-bit":
            raise MemoryError("too large")
        clock[0] += 50
        return {"finished": True, "curve": []}

    monkeypatch.setattr(scale, "train", train)
    run = dataclasses.replace(toy, now=lambda: clock[0], until=400.0)
    names = ["dense", "eden 1-bit", "SparseLoCo", "MuLoCo 1 %"]
    *_, done = scale.measure(names, run, {})
    shares = {"dense": 100, "eden 1-bit": 350 / 3, "SparseLoCo": 175, "MuLoCo 1 %": 300}
    assert given == pytest.approx(shares)
    assert done["eden 1-bit"] == {"finished": False, "curve": [], "error": "too large"}
    late = dataclasses.replace(run, until=clock[0])
    assert list(scale.measure(names, late, done)) == []


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        *("dense bfloat16", "eden 1-bit", "PowerSGD rank 8"),
        *("SparseLoCo", "FSDP 8/4 bits", "MuLoCo 1 %"),
    ],
)
def test_the_loss_of_every_method_falls(name, toy):
    import scale

    assert name in scale.methods.METHODS
    found = scale.train(name, toy, toy.scorer(), toy.until)
    assert found["finished"]
    assert found["curve"][-1][3] < found["curve"][0][3] - 0.1
    assert 0 < found["sent"] < 4 * SETTINGS["parameters"] * 7 / 4
    assert found["peak_bytes"] > 8 * 4 * SETTINGS["parameters"]


def test_all_methods_are_tested():
    import scale

    others = test_the_loss_of_every_method_falls.pytestmark[0].args[1]
    assert {"dense", "qsgd_inf 4-bit", *others} == set(scale.methods.METHODS)


def test_the_model_has_85_million_parameters():
    import jax
    from scale_model import Model

    like = jax.eval_shape(Model(12, 768, 64).init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(like)) == 85_347_072
    like = jax.eval_shape(Model(2, 48, 16).init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(like)) == SETTINGS["parameters"]


def test_a_package_with_other_files_is_named(monkeypatch):
    import scale_text

    contents = {name: path.read_bytes() for name, path in scale_text.files("optax").items()}
    known = scale_text.source_of("optax", contents)
    monkeypatch.setattr(scale_text, "PACKAGES", {"optax": known})
    text, differ = scale_text.read()
    assert not differ
    assert len(text.train) + len(text.validation) > known.bytes
    monkeypatch.setattr(scale_text, "PACKAGES", {"optax": known._replace(digest="0")})
    again, differ = scale_text.read()
    assert again.digest == text.digest
    assert len(differ) == 1
    assert "optax" in differ[0]


@pytest.mark.full
def test_the_committed_list_is_that_of_the_constraints():
    import scale_text

    for name, source in scale_text.PACKAGES.items():
        assert f"\n{name}=={source.version}\n" in (ROOT / "constraints.txt").read_text()
    if {name: scale_text.metadata.version(name) for name in scale_text.PACKAGES} != {
        name: source.version for name, source in scale_text.PACKAGES.items()
    }:
        pytest.skip("other versions are installed")
    text, differ = scale_text.read()
    assert differ == []
    assert 40e6 < len(text.train) < 60e6
