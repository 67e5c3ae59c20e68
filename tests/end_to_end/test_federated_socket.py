"""The example's server with hostile peers: honest clients finish with the same bits.

Everything is in one process: the server and the attackers in one event loop, clients in threads.
"""

import asyncio
import contextlib
import importlib
import pathlib
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paths import ROOT

import jaxcomp

EXAMPLES = ROOT / "examples"
SECRET = bytes(range(32))
ROUNDS = 2


@pytest.fixture(scope="module")
def example():
    """The modules of the example."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("federated_socket")


def train(example, honest, attack=None, clients=2, codec="qsgd_inf", patience=30, **bounds):
    """The parameters after a run of these honest clients beside an attack."""
    numbers = ["--clients", str(clients), "--rounds", str(ROUNDS), "--timeout", str(patience)]
    args = example.parse([*numbers, "--codec", codec])
    bounds = example.peers.Bounds(**{"hello": 2.0, "pause": 2.0, "answer": 30.0, **bounds})

    async def everything():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            server = asyncio.create_task(example.serve(listener, SECRET, args, bounds))
            ready = asyncio.Event()
            if attack is None:
                ready.set()
                attacking = asyncio.create_task(asyncio.sleep(0))
            else:
                attacking = asyncio.create_task(attack(port, ready))
            await ready.wait()  # Attackers come first.
            workers = [client(example, number, port, args) for number in honest]
            params, _, *_ = await asyncio.gather(server, attacking, *workers)
            return params

    return asyncio.run(asyncio.wait_for(everything(), 3 * patience))


async def client(example, number, port, args):
    await asyncio.to_thread(example.start, number, port, example.key_of(SECRET, number), args)


def assert_same(got, want):
    for name, leaf in want.items():
        assert np.asarray(got[name]).tobytes() == np.asarray(leaf).tobytes(), name


@contextlib.asynccontextmanager
async def connected(port, count=1):
    """So many connections, which are closed at the end."""
    found = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    yield found
    for _, writer in found:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def until_cut(reader):
    """Whatever comes, until the server has ended the connection."""
    with contextlib.suppress(OSError):
        while await reader.read(2**16):
            pass


async def leave(port, ready):
    """Connects and closes, many times."""
    for number in range(20):
        async with connected(port) as [(_, writer)]:
            if number % 2:
                writer.write(bytes(3))  # A part of a hello.
    ready.set()


async def silent(port, ready):
    """Connects and says nothing."""
    async with connected(port) as [(reader, _)]:
        ready.set()
        await until_cut(reader)


async def crowd(port, ready):
    """Says to be every client many times, and opens more connections than may wait."""
    async with connected(port, 40) as found:
        for number, (_, writer) in enumerate(found[:20]):
            writer.write((number % 3).to_bytes(4, "little") + bytes(32))
        ready.set()
        await asyncio.gather(*(until_cut(reader) for reader, _ in found))


async def slow(port, ready):
    """Sends a hello byte by byte."""
    async with connected(port) as [(reader, writer)]:
        ready.set()
        cut = asyncio.create_task(until_cut(reader))
        while not cut.done():
            writer.write(b"\0")
            await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed(example):
    return train(example, honest=(0, 1))


@pytest.mark.full
@pytest.mark.parametrize("attack", [leave, silent, crowd, slow])
def test_strangers_hold_nobody_up(attack, example, undisturbed, capsys):
    assert_same(train(example, (0, 1), attack), undisturbed)
    said = capsys.readouterr().out
    assert "a stranger is refused" in said
    assert "client 0" not in said


def flood(count):
    """So many hostile messages before the clients come, and more until the server has ended."""

    def said(number, draw):
        kinds = (b"", bytes(35), draw.bytes(36), (number % 2).to_bytes(4, "little") + bytes(32))
        return (*kinds, draw.bytes(5_000), b"GET / HTTP/1.1\r\n\r\n")[number % 6]

    async def attack(port, ready):
        draw = np.random.default_rng(0)

        async def one(number):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(OSError):
                writer.write(said(number, draw))
                await writer.drain()
            writer.close()

        used = memory()
        for number in range(count):
            await one(number)
        assert memory() - used < 50e6
        ready.set()
        with contextlib.suppress(OSError):
            for number in range(100 * count):
                await one(number)

    return attack


def memory():
    """The bytes of this process that belong to it alone."""
    text = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(text.partition("RssAnon:")[2].split()[0])


@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_hostile_messages_change_no_bit(count, example, undisturbed):
    got = train(example, (0, 1), flood(count), patience=30 + count / 200)
    assert_same(got, undisturbed)


def member(example, act):
    """An attacker that has a client's key, and does this once it has the first model."""

    async def attack(port, ready):
        key = example.key_of(SECRET, 2)
        peer = await example.peers.join(port, 2, key)
        ready.set()
        _, data = await peer.receive(2**20, 30)
        with contextlib.suppress(OSError):
            await act(peer, key, data)
            await until_cut(peer.reader)
        await peer.close()

    return attack


async def gone(peer, key, data):
    peer.cut()


async def unending(peer, key, data):
    """A message that comes byte by byte, each of them in time."""
    peer.writer.write((17_000).to_bytes(8, "little") + bytes(4))
    while not peer.reader.at_eof():
        peer.writer.write(b"\0")
        await asyncio.sleep(0.1)


async def broken_off(peer, key, data):
    """The beginning of a message, and nothing more."""
    peer.writer.write((17_000).to_bytes(8, "little") + bytes(5))


async def too_long(peer, key, data):
    await peer.send(0, bytes(10**6))


async def of_another_round(peer, key, data):
    await peer.send(1, bytes(100))


@pytest.fixture(scope="module")
def without_the_third(example):
    return train(example, (0, 1), member(example, gone), clients=3)


@pytest.mark.core("too_long-it anno*")
@pytest.mark.parametrize(
    ("act", "says"),
    [
        (unending, "it was too slow"),
        (broken_off, "it was too slow"),
        (too_long, "it announced 1,000,000 bytes, of at most"),
        (of_another_round, "it answered round 1, not 0"),
    ],
)
def test_a_client_that_misbehaves_is_cut_and_the_others_finish(
    act, says, example, without_the_third, capsys
):
    got = train(example, (0, 1), member(example, act), clients=3, answer=10.0)
    assert_same(got, without_the_third)
    assert f"client 2 is refused: {says}" in capsys.readouterr().out


def test_a_change_that_is_not_finite_is_refused(example, without_the_third, capsys):
    async def overflowed(peer, key, data):
        params = example.model.init(0)
        change = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), params)
        codec = example.CODECS["qsgd_inf"]
        payload = jaxcomp.encode(codec, 0, change, worker=2)
        secret = example.secret_of(key, 0, b"change")
        await peer.send(0, jaxcomp.to_bytes(codec, payload, params, secret=secret))

    got = train(example, (0, 1), member(example, overflowed), clients=3)
    assert_same(got, without_the_third)
    assert "client 2 is refused: `data` must hold finite values" in capsys.readouterr().out


def test_the_servers_own_message_is_no_answer(example, capsys):
    """An attacker on the network could send it back: both directions may use the same codec."""

    async def reflected(peer, key, data):
        await peer.send(0, data)

    train(example, (0, 1), member(example, reflected), clients=3, codec="float32")
    assert "client 2 is refused: `data` must have the checksum" in capsys.readouterr().out


def test_a_client_that_comes_back_takes_its_place_again(example, capsys):
    """Its first connection is silent in round one; the second one answers in round two."""

    async def attack(port, ready):
        args = example.parse(["--clients", "2", "--rounds", str(ROUNDS)])
        peer = await example.peers.join(port, 1, example.key_of(SECRET, 1))
        ready.set()
        await peer.receive(2**20, 30)
        await asyncio.gather(client(example, 1, port, args), until_cut(peer.reader))
        await peer.close()

    train(example, (0,), attack)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if " % " in line]
    assert [(row[0], row[3]) for row in rows] == [("1", "1"), ("2", "2")]
