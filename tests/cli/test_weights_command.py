"""`jaxcomp weights` lists and checks versions; `jaxcomp plan --weights` forecasts their bytes."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp
import jaxcomp_command


@pytest.fixture
def folder(tmp_path):
    draw = np.random.default_rng(0)
    w = draw.standard_normal(5000).astype(np.float32) * 0.02
    with jaxcomp.weights.Publisher(tmp_path, dtype=jnp.bfloat16, skips=(2,)) as publisher:
        for step in range(4):
            publisher.publish({"w": jnp.array(w)}, 10 * step)
            w = w - 6e-7 * draw.standard_normal(5000).astype(np.float32)
    return tmp_path


def run(capsys, *argv):
    jaxcomp_command.main([str(arg) for arg in argv])
    return capsys.readouterr().out


def refused(capsys, *argv):
    with pytest.raises(SystemExit) as ended:
        jaxcomp_command.main([str(arg) for arg in argv])
    assert ended.value.code == 2
    return capsys.readouterr()


def test_versions_are_listed(capsys, folder):
    told = json.loads(run(capsys, "weights", folder, "--json"))
    assert [(way["version"], way["base"]) for way in told] == [
        *((1, None), (2, 1), (3, 2), (4, 2), (4, 3)),
    ]
    assert {way["dense"] for way in told} == {10_000}
    assert all(way["fault"] is None for way in told)
    text = run(capsys, "weights", folder, "--verify")
    assert "4 versions of 10,000 bytes" in text
    assert "all files are right" in text


def test_damaged_files_are_found(capsys, folder):
    path = next((folder / "files").glob("0000000003-*"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    found = refused(capsys, "weights", folder, "--verify")
    assert "2 of 5 ways to versions are damaged" in found.err
    assert "altered" in found.out
    assert "version 3 before it is not right" in found.out


def test_wrong_urls_and_keys_are_told_in_a_line(capsys, tmp_path, folder):
    assert "got none at" in refused(capsys, "weights", tmp_path / "none").err
    assert "64 hexadecimal digits, got 'ab'" in refused(capsys, "weights", ".", "--key", "ab").err
    assert "is unsigned" in refused(capsys, "weights", folder, "--key", "01" * 32).err


def test_bytes_are_forecast(capsys):
    common = ("plan", "--weights", "7e9", "--link", "100Mbit")
    told = json.loads(run(capsys, *common, "--rate", "3e-6", "--json"))
    sizes = {way["way"]: way["size"] for way in told["ways"]}
    assert sizes["dense"] == 14e9
    assert 100 < sizes["dense"] / sizes["small"] < 125
    assert 60 < sizes["dense"] / sizes["fast"] < 85
    assert "of the weights change" in run(capsys, *common, "--rate", "3e-6")
    assert "--weights needs a --rate" in refused(capsys, *common).err
    both = refused(capsys, *common, "--rate", "1e-6", "--workers", "4")
    assert "--workers and --weights cannot be given together" in both.err
