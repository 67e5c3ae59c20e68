"""Files of lines: whole lines survive kills and full disks."""

import stat
import subprocess
import sys

import pytest

from jaxcomp_files import lines

LONG = b"x" * 200_000


def test_lines_are_read_from_where_the_last_reader_ended(tmp_path):
    path = tmp_path / "some.jsonl"
    lines.append(path, b"one")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found, end = lines.read(path)
    assert found == [b"one"]
    lines.append(path, b"two")
    assert lines.read(path, end) == ([b"two"], 8)
    assert lines.read(path, 8) == ([], 8)


@pytest.mark.parametrize("cut", [b"", b"t", LONG], ids=["none", "letter", "blocks"])
@pytest.mark.parametrize("before", [b"", b"one\n", LONG + b"\n"], ids=["empty", "line", "long"])
def test_a_cut_line_is_left_out_and_removed(tmp_path, before, cut):
    path = tmp_path / "some.jsonl"
    path.write_bytes(before + cut)
    assert lines.read(path) == (before.split(b"\n")[:-1], len(before))
    lines.append(path, b"new")
    assert path.read_bytes() == before + b"new\n"


def test_a_disk_with_little_room_keeps_whole_lines(tmp_path):
    """A process whose files may have 50 bytes: the kernel takes a part of a line, then fails."""
    script = """
import resource, signal, sys
from jaxcomp_files import lines
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.RLIM_INFINITY))
lines.append(sys.argv[1], b"a" * 29)
for _ in range(2):
    try:
        lines.append(sys.argv[1], b"b" * 29)
    except OSError as error:
        print(error.errno)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
lines.append(sys.argv[1], b"c" * 29)
"""
    pytest.importorskip("resource")
    path = tmp_path / "some.jsonl"
    command = [sys.executable, "-c", script, str(path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert len(said.stdout.split()) == 2
    assert path.read_bytes() == b"a" * 29 + b"\n" + b"c" * 29 + b"\n"
