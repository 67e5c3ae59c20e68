"""A relay passes bytes as a link of its delay and rate, and breaks connections as its seed says."""

import concurrent.futures
import contextlib
import gc
import os
import queue
import random
import socket
import threading
import time

import pytest

from jaxcomp.testing import Relay

LATE = 1.0
"""Seconds by which a busy machine may be late; nothing is ever early."""


@contextlib.contextmanager
def serving(handle):
    """A server on the loopback that handles each connection in a thread; its address."""
    threads = []

    def serve(listener):
        with contextlib.suppress(OSError):
            while True:
                threads.append(threading.Thread(target=run, args=[listener.accept()[0]]))
                threads[-1].start()

    def run(connection):
        with connection, contextlib.suppress(OSError):
            handle(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=serve, args=[listener])
        accepting.start()
        try:
            yield listener.getsockname()
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for thread in threads:
                thread.join(timeout=10)


def echo(connection):
    while data := connection.recv(2**16):
        connection.sendall(data)


def answer(connection):
    """Answers when the whole request is there, with the request reversed."""
    connection.sendall(everything(connection)[::-1])


def everything(connection):
    return b"".join(iter(lambda: connection.recv(2**16), b""))


def connect(relay):
    return socket.create_connection(("127.0.0.1", relay.port), timeout=10)


def ask(relay, data):
    """The answer to a request that ends with half of the connection."""
    with connect(relay) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        return everything(client)


def exchange(client, data):
    client.sendall(data)
    return receive(client, len(data))


def receive(client, size):
    found = b""
    while len(found) < size:
        data = client.recv(size - len(found))
        assert data, "the stream ended"
        found += data
    return found


@contextlib.contextmanager
def relayed(handle, **settings):
    with serving(handle) as to, Relay(to=to, **settings) as relay:
        yield relay


def is_reset(client):
    """Whether the stream ends in a reset."""
    try:
        everything(client)
    except ConnectionResetError:
        return True
    return False


@pytest.mark.parametrize("settings", [{}, {"delay": 0.01, "jitter": 0.02, "rate": 400e6}], ids=str)
def test_bytes_are_intact_both_ways(settings):
    draw = random.Random(0)
    requests = [os.urandom(draw.choice([0, 1, 1000, 70_000, 500_000])) for _ in range(12)]
    with relayed(answer, **settings) as relay, concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda data: ask(relay, data), requests))
        assert answers == [data[::-1] for data in requests]
        assert relay.up == relay.down == sum(map(len, requests))
        assert (relay.accepted, relay.broken) == (12, 0)


def test_a_server_may_speak_and_close_first():
    def handle(connection):
        connection.sendall(b"welcome")
        connection.shutdown(socket.SHUT_WR)
        heard.put(everything(connection))

    heard = queue.Queue()
    with relayed(handle, delay=0.005) as relay, connect(relay) as client:
        assert everything(client) == b"welcome"
        client.sendall(b"thanks")
        client.shutdown(socket.SHUT_WR)
        assert heard.get(timeout=10) == b"thanks"


def test_delay_is_that_of_the_link():
    with relayed(echo, delay=0.03) as relay, connect(relay) as client:
        times = []
        for _ in range(5):
            start = time.monotonic()
            assert exchange(client, b"ping") == b"ping"
            times.append(time.monotonic() - start)
    assert 0.06 <= min(times) < 0.06 + LATE


def test_bytes_in_flight_do_not_wait_for_each_other():
    """Twenty messages, 5 ms apart, arrive one delay after they were sent, not twenty."""
    with relayed(echo, delay=0.1) as relay, connect(relay) as client:
        start = time.monotonic()
        for number in range(20):
            client.sendall(bytes([number]))
            time.sleep(0.005)
        assert receive(client, 20) == bytes(range(20))
        took = time.monotonic() - start
    assert 19 * 0.005 + 0.2 <= took < 0.3 + LATE


@pytest.mark.parametrize("rate", [8e6, (4e6, 16e6), (None, 8e6)], ids=str)
def test_rate_is_that_of_the_link(rate):
    size, delay = 250_000, 0.05
    with relayed(answer, rate=rate, delay=delay) as relay:
        start = time.monotonic()
        ask(relay, bytes(size))
        took = time.monotonic() - start
    rates = rate if isinstance(rate, tuple) else (rate, rate)
    want = 2 * delay + sum(8 * size / one for one in rates if one)
    assert want <= took < 1.15 * want + LATE


def test_connections_share_the_rate():
    size, rate, clients = 60_000, 8e6, 5

    def count(connection):
        connection.sendall(b"%d" % len(everything(connection)))

    def end(client):
        assert everything(client) == b"60000"
        return time.monotonic() - start

    with relayed(count, rate=rate) as relay, contextlib.ExitStack() as stack:
        relay.stall()  # Until the kernel has all bytes of all clients.
        opened = [stack.enter_context(connect(relay)) for _ in range(clients)]
        for client in opened:
            client.sendall(bytes(size))
            client.shutdown(socket.SHUT_WR)
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            start = time.monotonic()
            relay.resume()
            times = list(pool.map(end, opened))
    alone = 8 * size / rate
    assert clients * alone <= max(times) < clients * alone + LATE
    assert min(times) > 2 * alone  # In turns, not one after another.


def test_jitter_keeps_the_order():
    sent = os.urandom(300)
    with relayed(echo, delay=0.005, jitter=0.05) as relay, connect(relay) as client:
        start = time.monotonic()
        for number in range(300):
            client.sendall(sent[number : number + 1])
            if number % 30 == 0:
                time.sleep(0.003)
        assert receive(client, 300) == sent
        assert time.monotonic() - start < 2 * 0.055 + 0.03 + LATE


def outcomes(count, **settings):
    """For each connection the number of bytes that came back before a reset, or None."""
    found = []
    with relayed(echo, **settings) as relay:
        for _ in range(count):
            back = 0
            try:
                with connect(relay) as client:
                    for _ in range(4):
                        back += len(exchange(client, bytes(50)))
                    client.shutdown(socket.SHUT_WR)
                    assert client.recv(1) == b""
                found.append(None)
            except ConnectionError:
                found.append(back)
        assert relay.accepted == count
        assert relay.broken == count - found.count(None)
    return found


def test_resets_are_those_of_the_seed():
    first = outcomes(60, resets=0.3, seed=1)
    assert first == outcomes(60, resets=0.3, seed=1)
    assert first != outcomes(60, resets=0.3, seed=2)
    broken = [back for back in first if back is not None]
    assert 8 <= len(broken) <= 28  # 18, and three standard deviations.
    assert min(broken) == 0
    assert max(broken) == 200  # At the end of the stream.
    assert outcomes(5, resets=1.0).count(None) == 0


def test_a_reset_is_seen_by_both_ends():
    def handle(connection):
        seen.put(is_reset(connection))

    seen = queue.Queue()
    with relayed(handle, resets=1.0, seed=3) as relay, connect(relay) as client:
        client.sendall(b"x")
        client.shutdown(socket.SHUT_WR)
        assert is_reset(client)
        assert seen.get(timeout=10)


def test_nothing_passes_while_stalled():
    with relayed(echo) as relay, connect(relay) as client:
        assert exchange(client, b"before") == b"before"
        relay.stall()
        client.sendall(b"during")
        with connect(relay) as late:
            late.sendall(b"new")
            client.settimeout(0.1)
            with pytest.raises(TimeoutError):
                client.recv(1)
            assert relay.up == relay.down == 6
            relay.resume()
            client.settimeout(10)
            assert receive(client, 6) == b"during"
            assert receive(late, 3) == b"new"


def test_a_stall_gives_no_rate_back():
    def handle(connection):
        for size in (1, 100_000):
            receive(connection, size)
            connection.sendall(b"+")

    with relayed(handle, rate=8e6) as relay, connect(relay) as client:
        assert exchange(client, b"-") == b"+"
        relay.stall()
        client.sendall(bytes(100_000))
        time.sleep(0.15)
        start = time.monotonic()
        relay.resume()
        assert receive(client, 1) == b"+"
        assert 0.1 <= time.monotonic() - start < 0.1 + LATE


def test_cut_resets_open_connections():
    with relayed(echo, delay=0.01) as relay:
        with connect(relay) as used, connect(relay) as unused:
            assert exchange(used, b"ping") == b"ping"
            with connect(relay) as newest:  # Which the relay may not have accepted yet.
                relay.cut()
                assert all(map(is_reset, (used, unused, newest)))
        with connect(relay) as later:
            assert exchange(later, b"ping") == b"ping"
        assert relay.broken == 0


def test_refused_connections_are_reset():
    with relayed(echo) as relay, connect(relay) as old:
        assert exchange(old, b"ping") == b"ping"
        relay.refuse()
        with pytest.raises(ConnectionResetError), connect(relay) as new:
            new.recv(1)  # Unless connecting failed already.
        assert exchange(old, b"ping") == b"ping"
        relay.accept()
        with connect(relay) as new:
            assert exchange(new, b"ping") == b"ping"


def test_resets_of_the_ends_pass_through():
    """As does what a server sent before its reset: here, its answer to half a request."""

    def handle(connection):
        receive(connection, 10)
        connection.sendall(b"too long")  # Closing before the rest is read sends a reset.

    with relayed(handle, delay=0.01) as relay, connect(relay) as client:
        client.sendall(bytes(100_000))
        assert receive(client, 8) == b"too long"
        assert is_reset(client)


def test_without_a_server_connections_are_reset():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        to = taken.getsockname()
    with Relay(to=to) as relay, pytest.raises(ConnectionResetError), connect(relay) as client:
        client.recv(1)  # Unless connecting failed already.


def test_a_receiver_that_does_not_read_stops_the_sender():
    read, sent, piece = threading.Event(), 0, bytes(2**20)
    with relayed(lambda _: read.wait(10)) as relay, connect(relay) as client:
        client.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            while sent < 2**28:
                sent += client.send(piece)
        read.set()
    assert 2**20 < sent < 2**27


def test_closing_is_prompt_and_leaves_nothing_behind():
    def files():
        gc.collect()
        return set(os.listdir("/dev/fd"))

    before = files()
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = Relay(to=server.getsockname(), delay=5.0, rate=1e3)
        for _ in range(2):  # A relay may be opened again.
            with relay, connect(relay) as client, connect(relay):
                client.sendall(bytes(10**5))
                server.accept()[0].close()
                port, start = relay.port, time.monotonic()
            assert time.monotonic() - start < LATE
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
        assert relay.accepted == 4
    assert "jaxcomp relay" not in {thread.name for thread in threading.enumerate()}
    assert files() <= before


WRONG = {
    "to": {"to": "localhost:80"},
    "to[1]": {"to": ("localhost", "80")},
    "delay": {"delay": -0.1},
    "jitter": {"jitter": None},
    "rate": {"rate": 0},
    "rate of one direction": {"rate": (8e6, -1.0)},
    "resets": {"resets": 1.5},
    "seed": {"seed": 0.5},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_of_a_relay_are_named(name):
    said = name.partition(" of ")[0].replace("[1]", r"\[1\]")
    with pytest.raises(ValueError, match=rf"^`{said}` must be "):
        Relay(**{"to": ("127.0.0.1", 80), **WRONG[name]})


def test_methods_need_an_open_relay():
    relay = Relay(to=("127.0.0.1", 80))
    with pytest.raises(RuntimeError, match="use `with Relay"):
        relay.stall()
    with relay, pytest.raises(RuntimeError, match="open already"):
        relay.__enter__()
