"""Versions survive kills, losses of power and damaged bits; they never touch what others wrote."""

import contextlib
import os
import random
import shutil

import pytest
from helpers.disks import Disk

from jaxcomp_files import durable, versions
from jaxcomp_files.versions import Versions

BEFORE = 3
"""Versions that are complete before the first kill."""


def round_of(folder):
    found = Versions(folder, "test").newest()
    if found is None:
        return 0
    number = found.about["round"]
    for name in ("state", "0.rows"):
        assert (found.path / name).read_bytes() == b"%d " % number * 200
    return number


def begun(disk, folder, rounds):
    for number in range(1, rounds + 1):
        disk.write(folder, number)
    return folder


def operations(disk, folder, rounds):
    """How many operations the next write has."""
    done = disk.done
    disk.write(folder, rounds + 1)
    return disk.done - done


@pytest.mark.core("few")
@pytest.mark.parametrize("every", [pytest.param(9, id="few"), pytest.param(1, id="all")])
@pytest.mark.parametrize("before", [0, 1, BEFORE])
def test_two_kills_anywhere_lose_no_version(before, every, tmp_path, monkeypatch):
    """After each, the last version that was completed is there, or the one that was begun."""
    disk = Disk(monkeypatch)
    count = operations(disk, begun(disk, tmp_path / "count", before), before)
    assert count > 25
    for first in range(count):
        once = begun(disk, tmp_path / f"once{first}", before)
        with disk.killed(first):
            disk.write(once, before + 1)
        found = round_of(once)
        assert found in (before, before + 1)
        # What the first has left is removed by more operations.
        for second in range(first % every, count + 10, every):
            twice = tmp_path / f"twice{first}.{second}"
            if once.exists():
                shutil.copytree(once, twice)
            with disk.killed(second):
                disk.write(twice, found + 1)
            assert round_of(twice) in (found, found + 1)
            disk.write(twice, 99)
            assert round_of(twice) == 99
            kept = [path.name for path in twice.iterdir() if path.is_dir()]
            assert len(kept) <= 2
            shutil.rmtree(twice)


def test_many_kills_one_after_another(tmp_path, monkeypatch):
    disk, draw, number = Disk(monkeypatch), random.Random(0), 0
    for _ in range(300):
        with disk.killed(draw.randrange(60)):
            disk.write(tmp_path / "kept", number + 1)
        found = round_of(tmp_path / "kept")
        assert found in (number, number + 1)
        number = found
    assert number > 50


@pytest.mark.parametrize("before", [0, BEFORE])
def test_a_loss_of_power_anywhere_loses_no_version(before, tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    count = operations(disk, begun(disk, tmp_path / "count", before), before)
    for at in range(count + 1):
        folder = begun(disk, tmp_path / f"at{at}", before)
        with disk.killed(at):
            disk.write(folder, before + 1)
        found = tmp_path / f"after{at}"
        disk.after_a_loss_of_power(folder, found)
        rounds = (before, before + 1) if at < count else (before + 1,)
        assert round_of(found) in rounds
        disk.write(found, 99)
        assert round_of(found) == 99


def files_in(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_flipped_bit_is_never_read(tmp_path, monkeypatch):
    """The version is whole, or the one before it is read with a warning, or it is an error."""
    disk, warned, draw = Disk(monkeypatch), 0, random.Random(0)
    folder = begun(disk, tmp_path / "kept", BEFORE)
    for path in files_in(folder):
        data = path.read_bytes()
        for bit in draw.sample(range(8 * len(data)), min(40, 8 * len(data))):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            warns = pytest.warns(UserWarning, match="goes back to")
            with warns if must_warn(path) else contextlib.nullcontext():
                assert round_of(folder) == (BEFORE - 1 if path.parent.name == NEWEST else BEFORE)
            warned += must_warn(path)
        path.write_bytes(data)
    assert warned > 100
    for path in files_in(folder):
        if path.name == "state":
            path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"`folder` must hold a version that is whole.*state is"):
        round_of(folder)


NEWEST = f"{BEFORE:010}"


def must_warn(path):
    return path.parent.name == NEWEST or path.name == "newest"


def test_a_version_that_was_completed_and_is_gone_is_missed(tmp_path, monkeypatch):
    folder = begun(Disk(monkeypatch), tmp_path / "kept", BEFORE)
    (folder / NEWEST / "manifest").unlink()
    with pytest.warns(UserWarning, match="was complete, and has no checksums"):
        assert round_of(folder) == BEFORE - 1
    shutil.rmtree(folder / NEWEST)
    with pytest.warns(UserWarning, match="it is gone"):
        assert round_of(folder) == BEFORE - 1
    shutil.rmtree(folder / f"{BEFORE - 1:010}")
    with pytest.raises(ValueError, match="it is gone"):
        round_of(folder)


def test_a_damaged_version_is_not_the_one_to_go_back_to(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    folder = begun(disk, tmp_path / "kept", BEFORE)
    (folder / NEWEST / "state").write_bytes(b"")
    kept = Versions(folder, "test")
    with pytest.warns(UserWarning, match="state is damaged"):
        kept.newest()
    kept.write({"state": disk.parts(7), "0.rows": disk.parts(7)}, {"round": 7})
    (folder / f"{BEFORE + 1:010}" / "state").write_bytes(b"")
    with pytest.warns(UserWarning, match="state is damaged"):
        assert round_of(folder) == BEFORE - 1


def test_what_others_wrote_stays(tmp_path, monkeypatch):
    """Beside the folder, in it and in a version; a folder of something else is refused."""
    disk = Disk(monkeypatch)
    foreign = [
        *(tmp_path / f"kept.{end}" / "thesis.tex" for end in ("old", "new")),
        tmp_path / "kept" / "notes.txt",
        tmp_path / "kept" / "0000000099" / "notes.txt",
        tmp_path / "kept" / "0000000001" / "notes.txt",
    ]
    begun(disk, tmp_path / "kept", 1)
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    with disk.killed(40):
        disk.write(tmp_path / "kept", 2)
    for number in range(3, 9):
        disk.write(tmp_path / "kept", number)
    assert round_of(tmp_path / "kept") == 8
    assert all(path.read_text() == "mine" for path in foreign)
    for folder in (tmp_path / "kept.old", foreign[0]):
        for use in (Versions(folder, "test").newest, Versions(folder, "test").own):
            with pytest.raises(ValueError, match="`folder` must be new, empty, or a folder in"):
                use()
        with pytest.raises(ValueError, match="`folder` must be new, empty, or a folder in"):
            disk.write(folder, 1)
    with pytest.raises(ValueError, match=r"must hold versions of kind 'other', got .* 'test'"):
        Versions(tmp_path / "kept", "other").write({"x": [b"1"]})
    assert round_of(tmp_path / "kept") == 8


def test_a_full_disk_is_an_error_that_changes_nothing(tmp_path, monkeypatch):
    folder = begun(Disk(monkeypatch), tmp_path / "kept", BEFORE)

    def full():
        yield b"1"
        raise OSError(28, "No space left on device")

    kept = Versions(folder, "test")
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            kept.write({"state": full()})
        assert round_of(folder) == BEFORE
    assert len(list(folder.glob("00*"))) == 3  # The last two, and one that is removed next time.


def test_only_the_user_can_read(tmp_path):
    mask = os.umask(0)
    try:
        kept = Versions(tmp_path / "a" / "kept", "test")
        kept.own()
        kept.write({"state": [b"1"]})
        durable.replace(tmp_path / "a" / "address", b"2")
    finally:
        os.umask(mask)
    found = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "a").rglob("*")}
    assert len(found) == 9
    for path, mode in (found | {tmp_path / "a": (tmp_path / "a").stat().st_mode & 0o777}).items():
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_a_version_that_was_taken_over_cannot_be_written(tmp_path):
    """As by a process that was stopped, where the system has no locks, or in this process."""
    first, second = (Versions(tmp_path / "kept", "test") for _ in range(2))
    first.own()
    first.write({"x": [b"1"]})
    second.own()
    with pytest.raises(ValueError, match=f"which process {os.getpid()} of .* has taken over"):
        first.write({"x": [b"2"]})
    second.write({"x": [b"3"]})
    assert (second.newest().path / "x").read_bytes() == b"3"
    again = Versions(tmp_path / "kept", "test")
    again.own()

    # Taken over while it writes: its version never counts.
    def late():
        yield b"4"
        Versions(tmp_path / "kept", "test").own()

    with pytest.raises(ValueError, match="has taken over"):
        again.write({"x": late()})
    assert (second.newest().path / "x").read_bytes() == b"3"


def test_names_of_files_stay_in_the_version(tmp_path):
    kept = Versions(tmp_path / "kept", "test")
    kept.write({"x": [b"1"]})
    (tmp_path / "other").write_text("mine")
    path = tmp_path / "kept" / "0000000002"
    path.mkdir()
    given = versions._Manifest("test", ["../../other"], None, {})
    durable.replace(path / "manifest", durable.seal(given._asdict()))
    kept.write({"x": [b"2"]})
    assert (tmp_path / "other").read_text() == "mine"
