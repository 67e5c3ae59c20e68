"""Trains one model over sockets: a server, and clients that never show it their data.

In every round the server sends the model, each client takes local steps on its own images of
handwritten digits, and sends back by how much its parameters changed, compressed and as bytes. One
client is a stranger that does not know the secret and sends garbage; it is refused. All are
processes of this machine that share nothing but TCP connections:

    python examples/federated_socket.py
    python examples/federated_socket.py --codec terngrad --clients 4 --rounds 12

It needs `pip install 'jaxcomp[examples]'` and downloads nothing.
"""

import argparse
import contextlib
import functools
import hashlib
import itertools
import multiprocessing
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import options
from sklearn.datasets import load_digits

import jaxcomp

jax.config.update("jax_platforms", "cpu")  # The processes would fight for an accelerator.

TEST_SIZE = 517
WIDTHS = (64, 256, 128, 10)
BATCH, LOCAL_STEPS, LEARNING_RATE = 32, 16, 0.2
CODECS = {
    "float32": jaxcomp.cast("float32"),
    "bf16": jaxcomp.cast("bfloat16"),
    "qsgd_inf": jaxcomp.qsgd_inf(bits=4),
    "eden": jaxcomp.eden(bits=2),
    "terngrad": jaxcomp.terngrad(),
}
MODEL_CODEC = CODECS["float32"]
"""How the model travels to the clients: whole, but checked like everything else."""
LENGTH = struct.Struct("<Q")
HELLO = struct.Struct("<I")


class Client(NamedTuple):
    """A client as the server knows it: which it says it is, and the connection to it."""

    number: int
    connection: socket.socket


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--codec", choices=CODECS, default="qsgd_inf", help="of the clients (default: qsgd_inf)")
    add("--clients", type=options.at_least(1), default=3, help="that work (default: 3)")
    add("--rounds", type=options.at_least(1), default=8, help="of training (default: 8)")
    add("--seed", type=options.at_least(0), default=0, help="of everything (default: 0)")
    add("--timeout", type=options.positive, default=60.0, help="seconds for a message (60)")
    return parser.parse_args(argv)


def load() -> tuple[np.ndarray, np.ndarray]:
    images, digits = (np.asarray(part) for part in load_digits(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(digits))
    return (images[order] / 16 - 0.3).astype(np.float32), digits[order].astype(np.int32)


def init(seed: int) -> dict[str, jax.Array]:
    draw = np.random.default_rng(seed)
    params = {}
    for layer, (rows, columns) in enumerate(itertools.pairwise(WIDTHS)):
        kernel = draw.standard_normal((rows, columns)) * np.sqrt(2 / rows)
        params[f"kernel{layer}"] = jnp.asarray(kernel, jnp.float32)
        params[f"bias{layer}"] = jnp.zeros(columns)
    return params


def logits_of(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    last = len(WIDTHS) - 2
    for layer in range(last):
        x = jax.nn.relu(x @ params[f"kernel{layer}"] + params[f"bias{layer}"])
    return x @ params[f"kernel{last}"] + params[f"bias{last}"]


@jax.jit
def accuracy_of(params: dict[str, jax.Array], images: jax.Array, digits: jax.Array) -> jax.Array:
    return 100 * jnp.mean(logits_of(params, images).argmax(-1) == digits)


@jax.jit
def change_of(params: dict[str, jax.Array], images: jax.Array, digits: jax.Array) -> Any:
    """By how much a pass of plain SGD over `[steps, batch]` images changes the parameters."""

    def loss(params, x, y):
        logits = jax.nn.log_softmax(logits_of(params, x))
        return -jnp.mean(jnp.take_along_axis(logits, y[:, None], axis=1))

    def step(now, batch):
        grads = jax.grad(loss)(now, *batch)
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, now, grads), None

    after, _ = jax.lax.scan(step, params, (images, digits))
    return jax.tree.map(jnp.subtract, after, params)


def secret_of(secret: bytes, number: int, round_: int) -> bytes:
    """The secret of one message, so that none can be sent again in another's place or round."""
    return hashlib.blake2b(struct.pack("<II", number, round_), key=secret).digest()


def send(connection: socket.socket, data: bytes) -> None:
    """A message, after its length."""
    connection.sendall(LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket, limit: int, timeout: float) -> bytes:
    """A message of at most so many bytes: nothing is made room for that could not be one."""
    deadline = time.monotonic() + timeout
    (length,) = LENGTH.unpack(read(connection, LENGTH.size, deadline))
    if length > limit:
        raise jaxcomp.MessageError(f"it announced {length:,} bytes, of at most {limit:,}")
    return read(connection, length, deadline)


def read(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Exactly so many bytes, however they arrive."""
    data = bytearray()
    while len(data) < size:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError(f"it left after {len(data):,} of {size:,} bytes")
        data += part
    return bytes(data)


def work(number: int, port: int, secret: bytes, args: argparse.Namespace) -> None:
    """A client, in a process of its own."""
    codec, like = CODECS[args.codec], init(args.seed)
    images, digits = (part[TEST_SIZE:][number :: args.clients] for part in load())
    draw = np.random.default_rng([args.seed, number])
    limit = jaxcomp.message_limit(MODEL_CODEC, like)
    with socket.create_connection(("127.0.0.1", port), timeout=args.timeout) as connection:
        connection.sendall(HELLO.pack(number))
        for round_ in range(args.rounds):
            ours = secret_of(secret, number, round_)
            data = receive(connection, limit, args.timeout)
            model = jaxcomp.from_bytes(MODEL_CODEC, data, like, secret=ours)
            params = jaxcomp.decode(MODEL_CODEC, round_, model, like)

            chosen = draw.integers(len(images), size=(LOCAL_STEPS, BATCH))
            change = change_of(params, images[chosen], digits[chosen])
            payload = jaxcomp.encode(codec, round_, change, worker=number)
            send(connection, jaxcomp.to_bytes(codec, payload, like, secret=ours))


def intrude(number: int, port: int, size: int) -> None:
    """A stranger, who sends a first message as long as one may be, of random bytes."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=10) as connection,
    ):
        connection.sendall(HELLO.pack(number))
        read(connection, LENGTH.size, time.monotonic() + 60)  # It has a model coming, too.
        send(connection, os.urandom(size))
        while connection.recv(2**16):
            pass


def admit(listener: socket.socket, count: int, timeout: float) -> list[Client]:
    """The first so many that connect and say who they are."""
    deadline, clients = time.monotonic() + timeout, []
    while len(clients) < count:
        listener.settimeout(max(deadline - time.monotonic(), 1e-3))
        connection, _ = listener.accept()
        (number,) = HELLO.unpack(read(connection, HELLO.size, deadline))
        clients.append(Client(number, connection))
    return sorted(clients, key=lambda client: client.number)


def ask(
    clients: Sequence[Client], params: Any, secret: bytes, round_: int, args: argparse.Namespace
) -> tuple[list[Client], list[Any], int]:
    """One round: the clients that answered as they should, their changes, and the bytes sent."""
    codec, good, changes, sent = CODECS[args.codec], [], [], 0
    model = jaxcomp.encode(MODEL_CODEC, round_, params)
    for number, connection in clients:
        ours = secret_of(secret, number, round_)
        connection.settimeout(args.timeout)
        with contextlib.suppress(OSError):  # Who has left is noticed below.
            send(connection, jaxcomp.to_bytes(MODEL_CODEC, model, params, secret=ours))
    limit = jaxcomp.message_limit(codec, params)
    for client in clients:
        try:
            data = receive(client.connection, limit, args.timeout)
            ours = secret_of(secret, client.number, round_)
            payload = jaxcomp.from_bytes(codec, data, params, secret=ours)
        except (jaxcomp.MessageError, OSError) as error:
            print(f"{round_ + 1:>5}  client {client.number} is refused: {error}", flush=True)
            client.connection.close()
            continue
        good.append(client)
        changes.append(jaxcomp.decode(codec, round_, payload, params, worker=client.number))
        sent += LENGTH.size + len(data)
    return good, changes, sent


@jax.jit
def moved(params: Any, changes: list[Any]) -> Any:
    """The parameters after the mean of these changes."""
    total = functools.reduce(functools.partial(jax.tree.map, jnp.add), changes)
    return jax.tree.map(lambda p, change: p + change / len(changes), params, total)


def serve(listener: socket.socket, secret: bytes, args: argparse.Namespace) -> None:
    """The server: the rounds, and a line for each."""
    params = init(args.seed)
    count = sum(leaf.size for leaf in params.values())
    images, digits = (part[:TEST_SIZE] for part in load())
    print(f"{args.clients} clients and a stranger, {count:,} parameters, codec {args.codec}")
    print("round  accuracy  clients  bytes up  bits a parameter  against float32", flush=True)
    clients = admit(listener, args.clients + 1, args.timeout)
    for round_ in range(args.rounds):
        clients, changes, sent = ask(clients, params, secret, round_, args)
        if not clients:
            raise SystemExit(f"round {round_ + 1}: no client is left")
        params = moved(params, changes)
        bits = 8 * sent / count / len(clients)
        print(
            f"{round_ + 1:>5}  {accuracy_of(params, images, digits):>6.1f} %  {len(clients):>7}  "
            f"{sent:>8,}  {bits:>16.2f}  {32 / bits:>13.1f}x",
            flush=True,
        )
    for client in clients:
        client.connection.close()


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    secret = secrets.token_bytes(32)  # Between machines it would come with each client's settings.
    spawn = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        workers = [
            spawn.Process(target=work, args=(number, port, secret, args), daemon=True)
            for number in range(args.clients)
        ]
        for worker in workers:
            worker.start()
        size = jaxcomp.message_limit(CODECS[args.codec], init(args.seed))
        stranger = threading.Thread(target=intrude, args=(args.clients, port, size), daemon=True)
        stranger.start()
        serve(listener, secret, args)
    for worker in workers:
        worker.join(args.timeout)
    failed = [number for number, worker in enumerate(workers) if worker.exitcode != 0]
    if failed:
        raise SystemExit(f"clients {failed} did not end as they should")


if __name__ == "__main__":
    main()
