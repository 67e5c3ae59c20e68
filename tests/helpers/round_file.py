"""Files of rounds, as the server of a training between sites writes them."""

import json

HOSTILE = {
    "script": "<script>alert(1)</script>",
    "quotes": "'\"`><img src=x onerror=alert(1)>",
    "direction": "abc\u202efdp.exe\u2066",
    "control": "\x1b[2J\x1b]0;title\x07\r\n\x00",
    "surrogate": "\ud800",
    "long": "n" * 10**7,
}
"""Texts that a site may send, by what is wrong with them."""


def start(number=0, until=100, time=0.0, name=1):
    return {"kind": "start", "start": name, "time": time, "round": number, "until": until}


def end(time, error=None, name=1):
    return {"kind": "end", "start": name, "time": time, "error": error}


def round_(number, sites=3, **more):
    """A round in which every site was accepted, at a tenth of a loss for each round."""
    clients = list(range(sites))
    accepted = {"client": clients, "age": 0, "up": 10, "loss": 0.5, "steps": 4, "seconds": 2.0}
    line = {"kind": "round", "round": number, "time": 10.0 * number, "seconds": 10.0}
    line |= {"loss": 9.0 - number / 10, "up": 10 * sites * (number + 1), "down": 0}
    line |= {"asked": {"client": clients, "down": 100}, "accepted": accepted}
    return line | {"nodes": {str(c): f"node {c}" for c in clients} if not number else {}} | more


def write(folder, *found, mode="w"):
    with (folder / "rounds.jsonl").open(mode) as file:
        file.writelines(f"{json.dumps(line)}\n" for line in found)
