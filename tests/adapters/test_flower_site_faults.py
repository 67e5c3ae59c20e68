"""What goes wrong at a site is told at once, at both ends, and loses nothing."""

import contextlib
import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import jax
import numpy as np
import pytest
from helpers.disks import Disk
from helpers.nodes import CLIENTS, Grid, data, grid_of, identity, params, strategy_of  # noqa: F401
from helpers.paths import ROOT

from jaxcomp import federated

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from test_flower_site import METHOD, SiteGrid, own_data

from jaxcomp.adapters import flower
from jaxcomp.adapters.flower import files
from jaxcomp_site import courier
from jaxcomp_site.packing import packed, unpacked

SECRET = b"0123456789abcdef"


def site_of(folder, **settings):
    given = {"data": own_data, **settings}
    return flower.Site(METHOD, params(), given.pop("data"), folder=folder, **given)


@functools.cache
def message():
    """What a site is asked in the first round, with its client's secret."""
    numbers = {100 + number: number for number in range(CLIENTS)}
    strategy = strategy_of(METHOD, secrets=lambda number: SECRET, numbers=numbers)
    grid = Grid(dict.fromkeys(numbers))
    return strategy.configure_train(1, None, ConfigRecord(), grid)[0].content


@functools.cache
def answer():
    """The answer of a site that nothing disturbs."""
    with tempfile.TemporaryDirectory() as folder:
        return sent_by(site_of(folder, secret=SECRET).answer(packed(message())))


def sent_by(said):
    """The payload in an answer, without the seconds that it took."""
    return unpacked(said)["jaxcomp.payload"]["0"].data


@pytest.fixture
def asked(identity):  # noqa: F811
    """A message and its answer."""
    return message(), answer()


@contextlib.contextmanager
def ask_of(site):
    """A function that asks a site which serves in a thread."""
    ended = threading.Event()
    thread = threading.Thread(target=site.serve, args=(ended.is_set,), daemon=True)
    thread.start()
    yield lambda content: courier.ask(site._folder, content, 20.0)
    ended.set()
    with contextlib.suppress(courier.SiteError):
        courier.ask(site._folder, b"", 1.0)
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("fails", ["data", "disk"])
def test_an_error_is_told_at_once_and_the_round_can_be_asked_again(
    fails, asked, tmp_path, monkeypatch, caplog
):
    content, answer = asked
    broken, begun, write = [True], [], files.write

    def shards(number, taken):
        begun.append(taken)
        if broken and fails == "data":
            raise FileNotFoundError(2, "No such file or directory", "shard7.bin")
        return own_data(number, taken)

    def full(memory, state):
        if broken and fails == "disk":
            raise OSError(28, "No space left on device")
        write(memory, state)

    monkeypatch.setattr(files, "write", full)
    site = site_of(tmp_path, data=shards, secret=SECRET)
    named, text = ("FileNotFoundError", "shard7") if fails == "data" else ("OSError", "No space")
    with ask_of(site) as ask:
        for _ in range(2):
            begin = time.monotonic()
            with pytest.raises(courier.SiteError, match=f"the site in {tmp_path}: {named}.*{text}"):
                ask(packed(content))
            assert time.monotonic() - begin < 10
            assert site.taken == 0
        broken.clear()
        assert sent_by(ask(packed(content))) == answer
    assert begun == [0, 0, 0]  # Nothing of a round is kept that is in no checkpoint.
    assert site.refused[named] == 2
    assert caplog.text.count(f"a message is refused: {named}") == 2
    modes = {p: p.stat().st_mode & 0o777 for p in tmp_path.rglob("*")}
    assert all(mode == (0o700 if p.is_dir() else 0o600) for p, mode in modes.items())


FIELDS = (*flower.records.Instruction._fields, "mac")


def damaged(asked):
    """Instructions that are not whole, by what is wrong with them."""
    instruction, parts = asked["jaxcomp.instruction"], asked["jaxcomp.parts"]

    def with_config(change):
        config = dict(instruction)
        change(config)
        return RecordDict({**asked, "jaxcomp.instruction": ConfigRecord(config)})

    for name in instruction:
        yield f"no {name}", with_config(lambda c, name=name: c.pop(name))
        for value in (-7, 2**63, 1.5, "text", True, b"", b"123", [1, 2]):
            if value != instruction[name]:
                yield f"{name} {value}", with_config(lambda c, n=name, v=value: c.update({n: v}))
    plain = dict(asked)
    for name in ("jaxcomp.instruction", "jaxcomp.parts"):
        yield f"no {name}", RecordDict({key: plain[key] for key in plain if key != name})
    yield "other record", RecordDict({**plain, "jaxcomp.instruction": parts})
    yield "other parts", RecordDict({**plain, "jaxcomp.parts": instruction})
    whole = parts["0"]
    for named, array in {
        "no part": {},
        "two parts": {"0": whole, "1": whole},
        "part of another name": {"1": whole},
        "short part": {"0": Array("uint8", (4,), whole.stype, b"1234")},
        "part of another type": {"0": Array("uint8", whole.shape, "other", whole.data)},
        "part of another dtype": {"0": Array("int8", whole.shape, whole.stype, whole.data)},
        "part of another shape": {"0": Array("uint8", (4,), whole.stype, whole.data)},
    }.items():
        yield named, RecordDict({**plain, "jaxcomp.parts": ArrayRecord(array)})


@pytest.mark.parametrize("secret", [SECRET, None], ids=["secret", "open"])
def test_an_instruction_that_is_not_whole_is_refused_with_a_line(secret, asked, tmp_path):
    """With a secret, whatever is wrong with its fields: who wrote it comes first."""
    sent, answer = asked
    site, count, whole = site_of(tmp_path, secret=secret), 0, packed(sent)
    for name, content in damaged(sent):
        if secret is None and name.startswith(("no mac", "mac")):
            continue
        of_field = secret is not None and name.removeprefix("no ").split()[0] in FIELDS
        says = (
            "with the client's secret"
            if of_field
            else "instruction must|a message|its array|`data`"
        )
        with pytest.raises(ValueError, match=says) as raised:
            site.answer(packed(content))
        assert len(str(raised.value).splitlines()) == 1, name
        count += 1
    for end in (0, 3, 8, 20, len(whole) // 2, len(whole) - 1):
        with pytest.raises(ValueError, match="no records of Flower"):
            site.answer(whole[:end])
    assert count > 80
    assert sum(site.refused.values()) == count + 6
    found = sent_by(site.answer(whole))
    assert (found == answer) == (secret is not None)  # It is signed, too.


def test_two_nodes_of_one_site_are_not_both_accepted(tmp_path):
    """The second would begin with an empty residual in each round, and so would the first."""
    grid, strategy, said = SiteGrid(tmp_path), strategy_of(METHOD), []
    grid.sites[101] = grid.sites[100]

    def listen(replies):
        said.extend(reply.error.reason for reply in replies if reply.has_error())
        return replies

    grid.spoil = listen
    strategy.start(grid, num_rounds=3)
    assert strategy.refused == {"failed": 3}
    assert all(
        text.startswith("a memory must be of one node, got that of client 0, node 100, and")
        and "client 1, node 101: give each node a folder of its own" in text
        for text in said
    )
    np.testing.assert_array_equal(strategy.accepted, [2, -1, 2, 2, 2])


def test_two_nodes_of_one_memory_are_not_both_accepted(tmp_path):
    """The same of clients whose processes end after each message."""
    grid = grid_of(METHOD, memory=lambda context: tmp_path / str(max(context.node_id, 101)))
    strategy = strategy_of(METHOD)
    strategy.start(grid, num_rounds=2)
    assert strategy.refused == {"failed": 2}
    np.testing.assert_array_equal(strategy.accepted, [1, -1, 1, 1, 1])


def test_a_node_that_comes_back_with_another_id_goes_on(tmp_path):
    """As a SuperNode without a key does: it gets the number of the node that is gone."""
    grid, strategy = SiteGrid(tmp_path), strategy_of(METHOD)
    strategy.start(grid, num_rounds=2)
    grid.apps[200], grid.contexts[200] = grid.apps.pop(100), grid.contexts.pop(100)
    strategy.start(grid, num_rounds=2)
    assert strategy.refused == {}
    sim = federated.Simulation(METHOD, params(), CLIENTS, data)
    sim.run(4)
    jax.tree.map(np.testing.assert_array_equal, strategy.params, sim.params)


HOLDER = """
import sys, time
from jaxcomp_files.versions import Versions
held = Versions(sys.argv[1], "memory")
held.own()
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_process_of_a_site_is_refused_and_an_old_one_cannot_answer(
    asked, tmp_path, monkeypatch
):
    content, answer = asked
    monkeypatch.setattr("jaxcomp.adapters.flower.site._PATIENCE", 0.2)
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "memory")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        named = f"its owner is process {other.pid}"
        try:
            says = f"`folder` must be a folder with which no .* {named}"
            with pytest.raises(ValueError, match=says):
                site_of(tmp_path)
        finally:
            other.kill()
    old = site_of(tmp_path, secret=SECRET)
    new = site_of(tmp_path, secret=SECRET)
    with pytest.raises(ValueError, match=r"which process \d+ of .* has taken over"):
        old.answer(packed(content))
    assert sent_by(new.answer(packed(content))) == answer


def test_a_damaged_memory_is_an_error_or_the_one_before_with_a_warning(tmp_path):
    grid, strategy = SiteGrid(tmp_path), strategy_of(METHOD)
    strategy.start(grid, num_rounds=2)
    newest, before = sorted((tmp_path / "100" / "memory").glob("00*"), reverse=True)
    for damage in (b"", b"no zip", b"PK\x03\x04" + b"\x00" * 99):
        (newest / "records").write_bytes(damage)
        with pytest.warns(UserWarning, match="goes back to"):
            assert site_of(tmp_path / "100").taken == grid.sites[100].taken // 2
    (before / "records").write_bytes(b"")
    with pytest.raises(ValueError, match="`folder` must hold a version that is whole"):
        site_of(tmp_path / "100")
    (tmp_path / "former").mkdir()
    (tmp_path / "former" / "memory").write_bytes(b"of a former format")
    with pytest.raises(ValueError, match="`folder` must be new, empty, or a folder in which"):
        site_of(tmp_path / "former")


def test_a_site_that_is_killed_in_its_checkpoint_gives_the_same_answer(
    asked, tmp_path, monkeypatch
):
    content, answer = asked
    disk = Disk(monkeypatch)
    for at in range(3, 40, 4):
        folder = tmp_path / str(at)
        with disk.killed(at):
            site_of(folder, secret=SECRET).answer(packed(content))
        assert sent_by(site_of(folder, secret=SECRET).answer(packed(content))) == answer


@contextlib.contextmanager
def serving(folder, answer):
    """A process that answers messages by an expression of `content`."""
    script = f"""
import pathlib, sys, time
from jaxcomp_site import courier
courier.serve(pathlib.Path(sys.argv[1]), lambda content: {answer}, lambda: False)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", script, str(folder)], env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_connection_that_sends_nothing_holds_nobody_up(tmp_path):
    with serving(tmp_path, "content"):
        assert courier.ask(tmp_path, b"one", 20.0) == b"one"
        port = json.loads((tmp_path / "address").read_text())["port"]
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
        silent[0].sendall(b"\x00" * 20)  # Less than a greeting.
        begin = time.monotonic()
        assert courier.ask(tmp_path, b"two", 20.0) == b"two"
        assert time.monotonic() - begin < 5
        for line in silent:
            line.close()


@pytest.mark.parametrize("when", ["before", "while it works"])
def test_a_site_that_is_stopped_is_not_waited_for_longer_than_the_patience(when, tmp_path):
    with serving(tmp_path, "time.sleep(3.5 * (content == b'works')) or content") as process:
        assert courier.ask(tmp_path, b"works", 3.0) == b"works"  # It says that it is there.
        if when == "before":
            process.send_signal(signal.SIGSTOP)
        else:
            threading.Timer(1.0, process.send_signal, [signal.SIGSTOP]).start()
        late = threading.Timer(10.0, process.send_signal, [signal.SIGCONT])
        late.start()
        begin = time.monotonic()
        with pytest.raises(courier.SiteError, match=r"the process of the site in .* said nothing"):
            courier.ask(tmp_path, b"works", 3.0)
        assert time.monotonic() - begin < 8
        late.cancel()
        process.send_signal(signal.SIGCONT)
        assert courier.ask(tmp_path, b"again", 20.0) == b"again"


def test_an_error_that_nobody_expected_is_told_and_the_site_stays_up(tmp_path):
    with serving(tmp_path, "{b'good': b'yes'}[content]"):
        with pytest.raises(courier.SiteError, match="KeyError: b'bad'"):
            courier.ask(tmp_path, b"bad", 20.0)
        assert courier.ask(tmp_path, b"good", 20.0) == b"yes"


def test_a_message_over_which_a_site_ends_again_and_again_is_given_up(tmp_path):
    """As for lack of memory: a supervisor starts it again, and it gets the same message."""
    begun = []

    def dies(content):
        begun.append(content)
        raise SystemExit

    def supervise():
        while len(begun) < courier._ENDS:
            with contextlib.suppress(SystemExit):
                courier.serve(tmp_path, dies, lambda: len(begun) == courier._ENDS)

    thread = threading.Thread(target=supervise, daemon=True)
    thread.start()
    with pytest.raises(courier.SiteError, match="has ended 5 times while it worked for this"):
        courier.ask(tmp_path, b"large", 20.0)
    thread.join(10)
    assert begun == [b"large"] * courier._ENDS


def test_an_address_of_somebody_else_stays(tmp_path):
    for name in ("address", "address.new"):
        (tmp_path / name).write_text("mine")
    with pytest.raises(
        ValueError, match="`folder` must be a site's own, got one with another file"
    ):
        courier.serve(pathlib.Path(tmp_path), bytes, lambda: True)
    (tmp_path / "address").unlink()
    courier.serve(pathlib.Path(tmp_path), bytes, lambda: True)
    courier.serve(pathlib.Path(tmp_path), bytes, lambda: True)
    assert (tmp_path / "address.new").read_text() == "mine"


def test_records_of_flower_are_those_that_were_packed():
    config = {"a": 1, "b": b"\x00\xff", "c": [0.5, 2.0], "d": [b"1", b""], "e": ["x"], "f": True}
    array = Array("uint8", (3,), "jaxcomp.memory/1", b"123")
    sent = RecordDict({"c": ConfigRecord(config), "a": ArrayRecord({"x": array, "y": array})})
    found = unpacked(packed(sent))
    assert dict(found["c"]) == config
    assert [found["a"][name].data for name in "xy"] == [b"123"] * 2
