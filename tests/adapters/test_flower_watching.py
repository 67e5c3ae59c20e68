"""The file of rounds that the server writes for `jaxcomp watch`."""

import errno
import json
import logging
import math
import os
import stat

import numpy as np
import pytest
from test_flower_quorum import (
    FEATURES,
    METHOD,
    SITES,
    SlowGrid,
    at_once,  # noqa: F401
    batches,
    identity,  # noqa: F401
)

from jaxcomp.adapters import flower
from jaxcomp.telemetry.rounds import Rounds
from jaxcomp_files import lines

LARGE = 10**6
REPORTED = {
    0: {"steps": 2, "seconds": 0.5, "tokens": 64},
    1: {"steps": math.nan, "seconds": -math.inf, "tokens": [1, 2, 3]},
    2: {"<script>alert(1)</script>": 1.0, "\u202etokens\x1b[2J": 2, "n" * LARGE: 3, "steps": 2**62},
}


def grid_of(due=lambda round, node: round, away=()):
    def app():
        return flower.client_app(
            METHOD,
            np.zeros(FEATURES, np.float32),
            batches,
            metrics=lambda context, number, round: REPORTED.get(number, {}),
        )

    grid = SlowGrid({100 + node: app for node in range(SITES)}, due)
    grid.away = set(away)
    return grid


def strategy_of(folder, **given):
    given = {"messages": 3, "deadline": 60.0, **given}
    return flower.CompressedFedAvg(
        METHOD,
        np.zeros(FEATURES, np.float32),
        SITES,
        quorum=flower.Quorum(**given),
        min_available_nodes=1,
        checkpoint=folder,
    )


def written(folder):
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def test_each_round_has_a_line_with_the_state_of_each_site(tmp_path):
    """Site 3 is late by one round, and its second message by two, which is too late."""

    def due(round, node):
        return round + ((1 + (round > 0)) if node == 103 else 0)

    strategy = strategy_of(tmp_path, oldest=1)
    strategy.start(grid_of(due), num_rounds=5)
    start, *rounds, end = written(tmp_path)
    assert (start["kind"], start["round"], start["until"], start["clients"]) == ("start", 0, 5, 4)
    assert (end["kind"], end["error"]) == ("end", None)
    assert [line["round"] for line in rounds] == list(range(5))
    assert [line["waiting"]["client"] for line in rounds] == [[3], [], [3], [3], []]
    assert rounds[3]["waiting"]["since"] == [2]
    assert rounds[1]["accepted"]["age"] == [0, 0, 0, 1]
    late = rounds[4]["refused"]
    assert [(one["client"], one["kind"]) for one in late] == [(3, "late")]
    assert "it answers round 2 in round 4" in late[0]["why"]
    assert late[0].get("up", 0) == 0  # It was not decoded.
    assert rounds[0]["nodes"] == {str(client): str(100 + client) for client in range(SITES)}
    assert rounds[1]["nodes"] == {}
    assert (rounds[-1]["up"], rounds[-1]["down"]) == (strategy.up, strategy.down)
    assert [line["loss"] for line in rounds] == pytest.approx([r.loss for r in strategy.reports])
    assert stat.S_IMODE((tmp_path / "rounds.jsonl").stat().st_mode) == 0o600

    found = Rounds(tmp_path)
    found.read()
    assert found.unread == 0
    sites = found.sites()
    assert [site["accepted"] for site in sites] == [5, 5, 5, 0]
    assert [(site["late"], site["refused"]) for site in sites] == [(0, 0)] * 3 + [(1, 1)]
    assert sum(site["up"] for site in sites) == strategy.up
    assert sum(site["down"] for site in sites) == strategy.down
    assert (sites[0]["steps"], sites[0]["tokens"]) == (4, 128)
    assert sites[3]["state"] == "refused"
    assert sites[3]["age"] == 1


def test_numbers_and_names_of_a_hostile_site_are_harmless(tmp_path):
    strategy_of(tmp_path).start(grid_of(), num_rounds=2)
    text = (tmp_path / "rounds.jsonl").read_text()
    assert "script" not in text
    assert "NaN" not in text
    assert len(text) < 4_000
    accepted = written(tmp_path)[1]["accepted"]
    assert accepted["steps"] == [2, None, None, None]
    assert accepted["tokens"] == [64, None, None, None]


def test_a_server_that_goes_on_completes_its_file(tmp_path):
    """A kill cut the last line; nodes are named again, and one is away."""
    strategy_of(tmp_path).start(grid_of(), num_rounds=2)
    whole = (tmp_path / "rounds.jsonl").read_bytes()
    (tmp_path / "rounds.jsonl").write_bytes(whole + b'{"kind":"round","round":2,"ti')
    again = strategy_of(tmp_path)
    again.restore(tmp_path)
    again.start(grid_of(away={101}), num_rounds=2)
    assert (tmp_path / "rounds.jsonl").read_bytes().startswith(whole + b'{"kind":"start"')
    kinds = ["start", "round", "round", "end"]
    assert [line["kind"] for line in written(tmp_path)] == 2 * kinds
    assert written(tmp_path)[5]["nodes"]["0"] == "100"
    found = Rounds(tmp_path)
    found.read()
    assert [row.round for row in found.rows] == [0, 1, 2, 3]
    assert [site["state"] for site in found.sites()] == ["accepted", "away", "accepted", "accepted"]


def test_a_full_disk_ends_no_training_and_is_said_once(tmp_path, monkeypatch, caplog):
    """It takes half of two lines, then has room again. The checkpoints are on another disk."""
    append, left = lines.append, [4]

    def append_on_a_full_disk(path, line):
        left[0] -= 1
        if left[0] not in (1, 2):
            append(path, line)
            return
        with path.open("ab") as file:
            file.write(line[: len(line) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lines, "append", append_on_a_full_disk)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    with caplog.at_level(logging.WARNING, "flwr"):
        strategy = strategy_of(tmp_path)
        strategy.start(grid_of(), num_rounds=4)
    assert len(strategy.reports) == 4
    said = [one.getMessage() for one in caplog.records if "watch" in one.getMessage()]
    assert len(said) == 1
    assert os.strerror(errno.ENOSPC) in said[0]
    assert [line.get("round") for line in written(tmp_path)] == [0, 2, 3, None]
    assert written(tmp_path)[1]["nodes"]["0"] == "100"  # The lines that were lost had them.


def test_an_error_that_ends_the_server_is_in_the_file(tmp_path, monkeypatch):
    strategy = strategy_of(tmp_path)

    def fail(folder):
        del folder
        raise OSError(errno.ENOSPC, "No space left on device")

    save = strategy.save
    strategy.save = lambda folder: save(folder) if not strategy.reports else fail(folder)
    with pytest.raises(OSError, match="No space"):
        strategy.start(grid_of(), num_rounds=3)
    found = Rounds(tmp_path)
    found.read()
    status = found.status(0.0)
    assert status["state"] == "failed"
    assert "No space left" in status["error"]
    assert status["done"] == 0  # The round has no checkpoint, so a restart repeats it.


def test_without_checkpoints_there_is_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    strategy_of(None).start(grid_of(), num_rounds=1)
    assert list(tmp_path.iterdir()) == []
