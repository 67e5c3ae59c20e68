"""Files that are cut or changed: one line and status 2, never a traceback; and JSON is strict."""

import io
import json

import numpy as np
import pytest

import jaxcomp_command
from jaxcomp.cli import fit, report
from jaxcomp.planning import plots


class Figure:
    """Draws nothing: matplotlib takes most of the time otherwise."""

    def __init__(self, **settings):
        self.canvas, self.saved = self, settings

    def get_supported_filetypes(self):
        return {"png": "a picture"}

    def savefig(self, path, **settings):
        self.saved = path, settings


def stored(save=np.savez, **leaves):
    file = io.BytesIO()
    save(file, **leaves)
    return file.getvalue()


GRADIENT = np.random.default_rng(0).laplace(size=(80, 60)).astype(np.float32)
WHOLE = {"w": GRADIENT, "b": GRADIENT[0]}
RUN = "".join(f"{t},{1 / (t + 1):.4f},{t},1000\n" for t in range(30))
PROGRAM = """HloModule step, num_partitions=8

%region_0 (a: f32[8]) -> f32[8] {
  ROOT %p.0 = f32[8]{0:T(256)} collective-permute(%a), source_target_pairs={{0,1},{1,0},{2,2}}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %g = (u32[4]{0}, u32[32]{0}) all-gather-start(%x), channel_id=3, replica_groups=[1,8]<=[8]
  %r = f32[8]{0} all-reduce(%x), replica_groups=mesh['a'=2,'b'=4] {'a'}, to_apply=%add
  ROOT %s = f32[8]{0} conditional(%i, %x, %x), branch_computations={%region_0, %region_1}
}
"""
VALID = {
    "fit": (stored(**WHOLE), stored(np.savez_compressed, **WHOLE)),
    "plan": (stored(np.savez_compressed, **WHOLE),),
    "report": (f"step,loss,residual_norm,link_bytes\n{RUN}".encode(),),
    "audit": (PROGRAM.encode(),),
}
ODD_GRADIENTS = (
    b"",
    b"PK\x03\x04",
    stored(w=np.zeros(0, np.float32)),
    stored(w=np.full(2000, np.nan, np.float32)),
    stored(w=np.array([{}], object)),
    stored(w=np.ones(3, int)),
)
ODD = {
    "fit": ODD_GRADIENTS,
    "plan": ODD_GRADIENTS,
    "report": (
        b"",
        b"step\n",
        b'step,loss\n1,"\n',
        b"step," + b"x" * 200_000 + b"\n1,2\n",
        b"\xff",
    ),
    "audit": tuple(
        PROGRAM.replace(*change).encode()
        for change in (
            ("f32[8]{0:T(256)}", "f32[8]{0:T(0)}"),
            ("f32[8]{0:T(256)}", "f32[8]{7:T(256)}"),
            ("f32[8]{0:T(256)}", "token[]"),
            ("[1,8]<=[8]", "[1,0]<=[8]"),
            ("{'a'}", "{'c'}"),
            ("f32[8]{0:T(256)}", f"f32[{'9' * 5000}]"),
        )
    ),
}
"""Each of them is refused."""
MORE = ("--budget", "9kB", "--workers", "4", "--link", "1Gbit", "--link-only", "--codec", "sign()")
ENDINGS = {"fit": "npz", "plan": "npz", "report": "csv", "audit": "txt"}


@pytest.fixture
def answer(tmp_path, capsys, monkeypatch):
    """Runs a command on a file of these bytes: its JSON, or None if it was refused in one line."""
    monkeypatch.setattr(plots, "figure_class", lambda: Figure)
    for module in (fit, report):
        monkeypatch.setattr(module, "draw", lambda *given: None)

    def refused(constant):
        raise AssertionError(f"{constant} is not JSON")

    def run(command, data):
        path = tmp_path / f"file.{ENDINGS[command]}"
        path.write_bytes(data)
        argv = ["plan", "--gradients", path, *MORE] if command == "plan" else [command, path]
        status = 0
        try:
            jaxcomp_command.main([*map(str, argv), "--json"])
        except SystemExit as end:
            status = end.code
        out, err = capsys.readouterr()
        if status == 0:
            return json.loads(out, parse_constant=refused)
        assert (status, out) == (2, "")
        assert err.startswith(f"jaxcomp {command}: ")
        assert err.count("\n") == 1, err
        return None

    return run


def changed(data, rng):
    """Cut somewhere, or with up to five other bytes."""
    if rng.integers(3) == 0:
        return data[: rng.integers(len(data))]
    found = bytearray(data)
    for at in rng.integers(len(data), size=rng.integers(1, 6)):
        found[at] = rng.integers(256)
    return bytes(found)


@pytest.mark.core("fit")
@pytest.mark.filterwarnings("ignore:compressed_mean compresses no leaf")
@pytest.mark.parametrize("command", VALID)
def test_a_broken_file_is_refused_in_one_line(command, answer):
    for data in ODD[command]:
        assert answer(command, data) is None, data[:80]
    rng, refusals = np.random.default_rng(1), 0
    for data in VALID[command]:
        assert answer(command, data)
        refusals += sum(answer(command, changed(data, rng)) is None for _ in range(60))
    assert refusals >= 20


def test_numbers_that_are_not_finite_are_null(answer):
    told = answer("report", b"step,loss,link_bytes\n1,inf,inf\n2,nan,-inf\n3,1.5,1\n")
    loss, link = told["values"]
    assert loss == {"name": "loss", "first": None, "median": 1.5, "last": 1.5, "total": None}
    assert link["first"] is link["total"] is None


def test_a_record_stands_for_all_steps_since_the_one_before(answer):
    told = answer("report", b"step,loss,link_bytes\n10,1,5\n20,1,5\n50,1,7\n")
    assert told["values"][1]["total"] == 10 * 5 + 10 * 5 + 30 * 7


def test_a_gradient_of_one_element_is_drawn(tmp_path, capsys):
    path = tmp_path / "one.npz"
    path.write_bytes(stored(w=np.ones((), np.float32)))
    jaxcomp_command.main(["fit", str(path)])
    assert (tmp_path / "fit.png").stat().st_size > 1000
