"""`jaxcomp fit`: saved gradients in, a table and a picture out."""

import json

import numpy as np
import pytest

import jaxcomp_command


@pytest.fixture
def saved(tmp_path):
    """Three gradients; the tails of the last are heavy."""
    draw = np.random.default_rng(0)
    paths = []
    for name, make in {
        "early": draw.laplace,
        "middle": draw.laplace,
        "late": lambda size: draw.standard_normal(size) ** 3,
    }.items():
        path = tmp_path / f"{name}.npz"
        leaves = {"kernel": make(size=(64, 32)), "bias": make(size=32), "still": np.zeros(2000)}
        np.savez(path, **{leaf: x.astype(np.float32) for leaf, x in leaves.items()})
        paths.append(path)
    return paths


def test_each_gradient_and_large_leaf_is_fitted_and_drawn(saved, capsys):
    jaxcomp_command.main(["fit", *map(str, saved), "--share", "0.02", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert list(told["gradients"]) == ["early", "middle", "late"]
    early, late = (told["gradients"][name] for name in ("early", "late"))
    assert list(early["leaves"]) == ["kernel"]  # Small leaves stay dense, and one is all zero.
    assert early["whole"]["elements"] == 64 * 32 + 32 + 2000
    assert early["leaves"]["kernel"]["exponential"]["distance"] < 0.05
    assert late["leaves"]["kernel"]["exponential"]["distance"] > 0.15
    assert early["leaves"]["kernel"]["exponential"]["kept"] == pytest.approx(1, abs=0.35)
    assert saved[0].with_name("fit.png").stat().st_size > 10_000


def test_the_table_names_the_best_law_and_the_picture(saved, capsys, tmp_path):
    picture = tmp_path / "laws.svg"
    jaxcomp_command.main(["fit", str(saved[2]), "--plot", str(picture)])
    out = capsys.readouterr().out
    assert str(picture) in out
    assert picture.read_text().startswith("<?xml")
    rows = [line.split() for line in out.splitlines() if line.startswith("late")]
    assert [row[1] for row in rows] == ["exponential", "gamma", "pareto"]
    assert rows[0][-1] == min(rows, key=lambda row: float(row[2]))[1]


def test_files_of_one_stem_are_told_apart_by_their_folders(saved, capsys, tmp_path):
    (tmp_path / "other").mkdir()
    twin = tmp_path / "other" / "early.npz"
    twin.write_bytes(saved[0].read_bytes())
    jaxcomp_command.main(["fit", str(saved[0]), str(twin), "--json"])
    names = list(json.loads(capsys.readouterr().out)["gradients"])
    assert names == [f"{tmp_path.name}/early", "other/early"]
    with pytest.raises(SystemExit, match="2"):
        jaxcomp_command.main(["fit", str(twin), str(twin)])
    assert "must be given once" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["text", "integers", "none", "picture", "share"])
def test_wrong_use_is_one_line(saved, capsys, tmp_path, wrong):
    path, more = tmp_path / "wrong.npz", []
    if wrong == "text":
        path.write_text("no archive")
    elif wrong == "integers":
        np.savez(path, step=np.arange(3))
    elif wrong == "picture":
        path, more = saved[0], ["--plot", str(tmp_path / "laws.docx")]
    elif wrong == "share":
        path, more = saved[0], ["--share", "0"]
    with pytest.raises(SystemExit, match="2"):
        jaxcomp_command.main(["fit", str(path), *more])
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("jaxcomp fit: ")
    assert ("cannot read" if wrong == "none" else "must") in said
