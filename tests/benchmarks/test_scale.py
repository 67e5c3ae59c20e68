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


@pytest.fixture(scope="module", autouse=True)
def importable():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")  # As `reporting`, perhaps imported before.
        patch.syspath_prepend(ROOT / "benchmarks")
        yield


@pytest.fixture(scope="module")
def toy(importable):
    """A call whose clock does not end it, compiled in half the time."""
    import byte_lm_model
    import scale

    files = sorted((ROOT / "jaxcomp" / "bits").glob("*.py"))
    train, held_out = (b"\0".join(path.read_bytes() for path in files[at::2]) for at in (0, 1))
    text = byte_lm_model.Text(
        np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8), "toy"
    )
    return scale.Run(
        settings=SETTINGS,
        text=text,
        now=time.monotonic,
        until=time.monotonic() + 3600,
        compiler={"xla_backend_optimization_level": 0},
    )


@pytest.fixture(scope="module")
def score(toy):
    return toy.scorer()


class Steady:
    """A compiled method whose steps take so many seconds."""

    carried, compile_s = ({},), 0.0

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def take(self, number, batch):
        self.clock[0] += self.seconds

    def peak(self):
        return 1


def test_a_call_after_a_kill_skips_finished_methods(toy, tmp_path, monkeypatch):
    """A method that was killed is run anew; one of other settings is refused."""
    import scale

    clock, begun = [0.0], []
    run = dataclasses.replace(toy, now=lambda: clock[0], until=1e6)
    scores = (8.0 - 0.01 * number for number in itertools.count())
    monkeypatch.setattr(scale, "Trainer", lambda way, run: Steady(clock, 1))
    monkeypatch.setattr(scale.Run, "scorer", lambda self: lambda params: next(scores))
    way = scale.methods.Way(None, None, None, lambda carried: {}, 7.0)

    def measure(kill):
        def make(name):
            def method(task):
                begun.append(name)
                if name == kill:
                    raise KeyboardInterrupt
                return way

            return method

        names = ["dense", "eden 1-bit", "SparseLoCo"]
        monkeypatch.setattr(scale.methods, "METHODS", {name: make(name) for name in names})
        for done in scale.measure(names, run, scale.previous(tmp_path, run.settings)):
            scale.write(run, done, tmp_path)

    with pytest.raises(KeyboardInterrupt):
        measure("eden 1-bit")
    first = json.loads((tmp_path / "scale.json").read_text())["methods"]
    assert list(first) == ["dense"]
    assert first["dense"]["finished"]
    measure(None)
    assert begun == ["dense", "eden 1-bit", "eden 1-bit", "SparseLoCo"]
    found = json.loads((tmp_path / "scale.json").read_text())["methods"]
    assert found["dense"] == first["dense"]
    assert [[*map(int, point[:3])] for point in found["SparseLoCo"]["curve"]] == [
        [0, 0, 0], [4, 4 * 512, 28], [8, 8 * 512, 56]
    ]  # fmt: skip
    measure("dense")  # Nothing is left.
    assert len(begun) == 4
    assert (tmp_path / "scale.png").stat().st_size > 20_000
    table = (tmp_path / "scale.md").read_text()
    assert "| dense | 8 | " in table
    with pytest.raises(SystemExit, match="other settings"):
        scale.previous(tmp_path, {**run.settings, "steps": 9})


def test_the_clock_ends_a_method_in_time(toy, monkeypatch):
    """Steps of ten seconds, scores of thirty: a step begins if it and a score fit."""
    import scale

    seconds = itertools.count()
    clock = [0.0]
    monkeypatch.setattr(scale, "Trainer", lambda way, run: Steady(clock, 10))
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


METHODS = (
    *("dense", "dense bfloat16", "qsgd_inf 4-bit", "eden 1-bit", "PowerSGD rank 8"),
    *("SparseLoCo", "FSDP 8/4 bits", "MuLoCo 1 %"),
)


@pytest.mark.core("dense")
@pytest.mark.parametrize("name", METHODS)
def test_the_loss_of_every_method_falls(name, toy, score):
    import scale

    assert tuple(scale.methods.METHODS) == METHODS
    found = scale.train(name, toy, score, toy.until)
    assert found["finished"]
    assert [point[0] for point in found["curve"]] == [0, 4, 8]
    assert found["curve"][-1][3] < found["curve"][0][3] - 0.1  # Bits per byte.
    # An all-reduce over eight workers sends seven quarters of the parameters.
    assert 0 < found["sent"] <= 4 * SETTINGS["parameters"] * 7 / 4
    assert found["peak_bytes"] > 8 * 4 * SETTINGS["parameters"]


def test_the_model_has_85_million_parameters():
    import jax
    from scale_model import Model

    def size(model):
        return sum(leaf.size for leaf in jax.tree.leaves(model.shapes()))

    assert size(Model(12, 768, 64)) == 85_347_072
    small = Model(2, 48, 16)
    assert size(small) == SETTINGS["parameters"]
    assert jax.tree.map(np.shape, small.init(0)) == jax.tree.map(np.shape, small.shapes())


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
