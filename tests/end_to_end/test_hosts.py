"""The example over hosts: it goes on from a checkpoint with the same losses."""

import os
import re
import subprocess
import sys

import pytest
from helpers.paths import ROOT

SMALL = ("--layers", "1", "--width", "32", "--context", "32", "--batch-size", "8")


def ran(folder, steps, *more, **environment):
    command = [sys.executable, ROOT / "examples" / "hosts.py", "--out", folder, *SMALL, *more]
    command += ["--steps", str(steps), "--checkpoint-every", "2"]
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **environment},
    )


def losses(folder, steps, **environment):
    """The losses that it prints, by step."""
    found = ran(folder, steps, **environment)
    assert found.returncode == 0, found.stdout + found.stderr
    return dict(re.findall(r"step (\d+): loss (\S+),", found.stdout))


@pytest.mark.full
def test_a_run_over_hosts_goes_on_where_it_was_stopped(tmp_path):
    whole = losses(tmp_path / "whole", 4)
    assert sorted(whole) == ["2", "4"]
    assert losses(tmp_path / "parts", 2) == {"2": whole["2"]}
    assert losses(tmp_path / "parts", 4) == {"4": whole["4"]}
    other = ran(tmp_path / "parts", 6, "--bits", "8")
    assert other.returncode == 1
    assert "has a run with {'layers': 1, 'width': 32, 'bits': 4, 'rank': None}" in other.stderr
