"""The rounds of a training, as `jaxcomp watch` reads them."""

import json
import os

import pytest
from helpers.round_file import HOSTILE, end, round_, start, write

from jaxcomp.telemetry import round_lines
from jaxcomp.telemetry.rounds import Rounds


def read(folder):
    rounds = Rounds(folder)
    rounds.read()
    return rounds


def test_lines_are_read_on_and_in_one_go_alike(tmp_path):
    found = [start(), *(round_(n) for n in range(130))]
    found[60]["refused"] = [{"client": 1, "kind": "failed", "why": "no disk", "up": 3}]
    found[90]["refused"] = [{"client": 1, "kind": "failed"}, {"client": None, "kind": "malformed"}]
    found[130] |= {"waiting": {"client": [2], "since": [128]}, "away": [0]}
    write(tmp_path, *found[:10])
    on = read(tmp_path)
    for first in range(10, len(found), 30):
        write(tmp_path, *found[first : first + 30], mode="a")
        on.read()
    once = read(tmp_path)
    assert on.epoch == once.epoch
    assert on.rows == once.rows
    assert [row.round for row in once.rows] == list(range(130))
    assert on.sites() == once.sites()
    assert on.status(1300.0) == once.status(1300.0)
    away, refused, working = once.sites()
    assert (away["state"], working["state"], working["note"]) == (
        "away",
        "working",
        "since round 128",
    )
    assert refused["reasons"] == {"failed": 2}
    assert refused["why"] == "failed: no disk"
    assert (refused["up"], refused["down"], refused["steps"]) == (1303, 13_000, 2)
    assert once.status(1300.0)["strangers"] == {"malformed": 1}


def test_a_last_line_that_was_cut_is_left_until_it_is_whole(tmp_path):
    text = json.dumps(round_(1))
    write(tmp_path, start(), round_(0))
    whole = (tmp_path / "rounds.jsonl").read_bytes()
    (tmp_path / "rounds.jsonl").write_bytes(whole + text[:50].encode())
    rounds = read(tmp_path)
    assert (len(rounds.rows), rounds.unread) == (1, 0)
    (tmp_path / "rounds.jsonl").write_bytes(whole + text.encode() + b"\n")
    rounds.read()
    assert (len(rounds.rows), rounds.unread) == (2, 0)


def test_a_round_that_is_repeated_takes_the_place_of_the_older_one(tmp_path):
    """A server went back from round 4 to round 2; the page learns it by a new epoch."""
    write(tmp_path, start(), *(round_(n) for n in range(5)))
    rounds = read(tmp_path)
    before = rounds.epoch
    write(tmp_path, start(2, name=2), round_(2, loss=7.0, sites=2), mode="a")
    rounds.read()
    assert rounds.epoch > before
    assert [row.loss for row in rounds.rows] == [9.0, 8.9, 7.0]
    assert [site["accepted"] for site in rounds.sites()] == [3, 3, 2]
    assert rounds.news(before, 5, 50.0)["after"] == 0
    assert rounds.news(before, 5, 50.0)["rounds"]["round"] == [0, 1, 2]
    write(tmp_path, round_(2, loss=6.0), mode="a")  # Also without the line of a start.
    rounds.read()
    assert [row.loss for row in rounds.rows] == [9.0, 8.9, 6.0]
    assert [row.loss for row in read(tmp_path).rows] == [9.0, 8.9, 6.0]


def test_a_file_that_is_another_one_is_read_anew(tmp_path):
    write(tmp_path, start(), *(round_(n) for n in range(5)))
    rounds = read(tmp_path)
    write(tmp_path, start(), round_(0))  # Shorter.
    rounds.read()
    assert len(rounds.rows) == 1
    write(tmp_path, start(), *(round_(n) for n in range(9)))
    other = tmp_path / "other"
    other.write_bytes((tmp_path / "rounds.jsonl").read_bytes())
    os.replace(other, tmp_path / "rounds.jsonl")
    rounds.read()
    assert len(rounds.rows) == 9
    (tmp_path / "rounds.jsonl").unlink()
    with pytest.raises(ValueError, match="cannot read"):
        rounds.read()


def test_a_page_gets_only_what_is_new(tmp_path):
    write(tmp_path, start(), *(round_(n) for n in range(5)))
    rounds = read(tmp_path)
    first = rounds.news(0, 0, 50.0)
    assert first["rounds"]["round"] == [0, 1, 2, 3, 4]
    again = rounds.news(first["epoch"], 5, 51.0)
    assert (again["rounds"]["round"], again["sites"]) == ([], None)
    write(tmp_path, round_(5), mode="a")
    rounds.read()
    more = rounds.news(first["epoch"], 5, 60.0)
    assert (more["after"], more["rounds"]["loss"], len(more["sites"])) == (5, [8.5], 3)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_texts_of_sites_are_short_and_printable(tmp_path, text):
    why = [{"client": 1, "kind": "failed", "why": text}]
    write(tmp_path, start(), round_(0, refused=why, nodes={"1": text}), end(5.0, text))
    rounds = read(tmp_path)
    assert rounds.unread == 0
    site = rounds.sites()[1]
    for shown in (site["node"], site["why"], rounds.status(9.0)["error"]):
        assert shown.isprintable()
        assert len(shown) <= 220
    json.dumps(rounds.news(0, 0, 9.0), allow_nan=False).encode()


WRONG = {
    "no JSON": b"{",
    "a list": b"[]",
    "no text": b"\xff\xfe",
    "deep": b"[" * 100_000,
    "another kind": b'{"kind": "x", "round": 1, "time": 1}',
    "a round that is a truth": b'{"kind": "round", "round": true, "time": 1}',
    "a large integer": b'{"kind": "round", "round": 1' + b"0" * 5000 + b', "time": 1}',
}
TABLES = {
    "no site": {"accepted": {"client": [-1], "age": 0, "up": 0}},
    "many sites": {"accepted": {"client": [10**9], "age": 0, "up": 0}},
    "half a site": {"asked": {"client": [0.5], "down": 0}},
    "bytes that are NaN": {"asked": {"client": [0], "down": [float("nan")]}},
    "negative bytes": {"asked": {"client": [0], "down": [-5]}},
    "unequal columns": {"asked": {"client": [0, 1], "down": [1]}},
    "a text": {"accepted": {"client": [0], "age": 0, "up": 0, "loss": ["<b>"]}},
    "a table in a column": {"accepted": {"client": [0], "age": 0, "up": [[1]]}},
    "a huge integer": {"accepted": {"client": [0], "age": 0, "up": [10**400]}},
    "no columns": {"accepted": 3},
    "a refusal of nobody": {"refused": [{}]},
    "a refusal of a text": {"refused": [{"client": "0", "kind": "failed"}]},
    "a seat of a text": {"nodes": {"x": "node"}},
    "no time": {"time": None},
    "a time after the sun": {"time": 1e300},
}


def test_lines_that_are_wrong_are_counted_and_left_out(tmp_path):
    write(tmp_path, start(), round_(0))
    with (tmp_path / "rounds.jsonl").open("ab") as file:
        file.writelines(line + b"\n" for line in WRONG.values())
    write(tmp_path, *(round_(1 + i) | table for i, table in enumerate(TABLES.values())), mode="a")
    write(tmp_path, round_(40), mode="a")
    rounds = read(tmp_path)
    assert [row.round for row in rounds.rows] == [0, 40]
    assert rounds.unread == len(WRONG) + len(TABLES)
    assert [site["accepted"] for site in rounds.sites()] == [2, 2, 2]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e308, -1.0, 10**300])
def test_numbers_that_are_no_numbers_are_shown_as_unknown_or_as_they_are(tmp_path, value):
    line = round_(0, loss=value, seconds=value)
    for name in ("loss", "steps", "seconds", "tokens"):
        line["accepted"][name] = value
    write(tmp_path, start(), line, round_(1))
    rounds = read(tmp_path)
    assert (len(rounds.rows), rounds.unread) == (2, 0)
    json.dumps(rounds.news(0, 0, 20.0), allow_nan=False)


def test_the_forecast_and_a_silent_server(tmp_path):
    """Rounds of ten seconds: round 4 ended at 40 s, so round 99 ends at 990 s."""
    write(tmp_path, start(), *(round_(n) for n in range(5)))
    rounds = read(tmp_path)
    status = rounds.status(45.0)
    assert (status["state"], status["done"], status["pace"]) == ("training", 5, 10.0)
    assert status["forecast"] == 990.0
    assert (status["age"], status["allowed"]) == (5.0, 25.0)
    assert rounds.status(64.0)["state"] == "training"
    silent = rounds.status(66.0)
    assert (silent["state"], silent["forecast"]) == ("silent", None)
    write(tmp_path, start(5, until=None, time=70.0, name=2), mode="a")
    rounds.read()
    assert rounds.status(120.0)["state"] == "training"  # It compiles.
    assert rounds.status(120.0)["forecast"] is None
    write(tmp_path, round_(5), end(100.0, "OSError: no disk", name=2), mode="a")
    rounds.read()
    assert rounds.status(500.0)["state"] == "failed"
    write(tmp_path, end(100.0, name=1), mode="a")  # Of a process that had been replaced.
    rounds.read()
    assert rounds.status(500.0)["state"] == "silent"


def test_a_file_without_rounds_and_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"`folder` must be that of a server's checkpoints"):
        Rounds(tmp_path)
    write(tmp_path)
    rounds = read(tmp_path)
    assert rounds.status(5.0)["state"] == "training"
    assert rounds.sites() == []


def test_ten_thousand_rounds_of_a_hundred_sites_are_read_in_columns(tmp_path, monkeypatch):
    """Each line is decoded once and few tables are made, so the time is that of the JSON."""
    write(tmp_path, start(), *(round_(n, 100) for n in range(2000)))
    calls = {"parse": 0, "tables": 0}
    for name in calls:
        plain = getattr(round_lines, name)

        def counted(*args, name=name, plain=plain):
            calls[name] += 1
            return plain(*args)

        monkeypatch.setattr(round_lines, name, counted)
    rounds = read(tmp_path)
    assert calls == {"parse": 2001, "tables": 40}
    assert [site["accepted"] for site in rounds.sites()] == [2000] * 100
