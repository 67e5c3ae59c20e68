"""Trains one model over sockets: a server, and clients that never show it their data.

In every round the server sends the model, each client takes local steps on its own images of
handwritten digits, and sends back by how much its parameters changed, compressed and as bytes. Two
strangers without a key connect too: one stays silent, one sends garbage. Neither takes a client's
place or holds anybody up (`federated_peers.py` says how). All clients are processes of this machine
that share nothing but TCP connections:

    python examples/federated_socket.py
    python examples/federated_socket.py --codec terngrad --clients 4 --rounds 12

It needs `pip install '.[examples]'` and downloads nothing.
"""

import argparse
import asyncio
import contextlib
import hashlib
import multiprocessing
import os
import secrets
import socket
import struct
import threading
from typing import Any

import federated_model as model
import federated_peers as peers
import jax
import numpy as np
import options

import jaxcomp

BATCH, LOCAL_STEPS = 32, 16
CODECS = {
    "float32": jaxcomp.cast("float32"),
    "bf16": jaxcomp.cast("bfloat16"),
    "qsgd_inf": jaxcomp.qsgd_inf(bits=4),
    "eden": jaxcomp.eden(bits=2),
    "terngrad": jaxcomp.terngrad(),
}
MODEL_CODEC = CODECS["float32"]
"""How the model travels to the clients: whole, but checked like everything else."""
PATIENCE = 3
"""How many times longer a client waits than the server: it must outlast the slowest other one."""
TRIES = 5
"""How often a client connects again."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--codec", choices=CODECS, default="qsgd_inf", help="of the clients (default: qsgd_inf)")
    add("--clients", type=options.at_least(1), default=3, help="that work (default: 3)")
    add("--rounds", type=options.at_least(1), default=8, help="of training (default: 8)")
    add("--seed", type=options.at_least(0), default=0, help="of everything (default: 0)")
    add(
        "--timeout",
        type=options.positive,
        default=60.0,
        help="seconds that clients have to connect, and to answer in each round (default: 60)",
    )
    return parser.parse_args(argv)


def key_of(secret: bytes, number: int) -> bytes:
    """A client's own key; without it nobody can impersonate the client."""
    return hashlib.blake2b(struct.pack("<I", number), key=secret, digest_size=32).digest()


def secret_of(key: bytes, round_: int, direction: bytes) -> bytes:
    """The secret of one message, which is of no use in another round or in the other direction."""
    return hashlib.blake2b(struct.pack("<I", round_), key=key, person=direction).digest()


def start(number: int, port: int, key: bytes, args: argparse.Namespace) -> None:
    """A client, in a process of its own."""
    asyncio.run(work(number, port, key, args))


async def work(number: int, port: int, key: bytes, args: argparse.Namespace) -> None:
    """A client, which connects again if its connection breaks."""
    for left in reversed(range(TRIES)):
        try:
            await take_part(number, port, key, args)
        except (OSError, EOFError):
            if not left:
                raise
            await asyncio.sleep(0.1)
        else:
            return


async def take_part(number: int, port: int, key: bytes, args: argparse.Namespace) -> None:
    """Answers the server until the last round."""
    codec, like, round_ = CODECS[args.codec], model.init(args.seed), -1
    images, digits = (part[number :: args.clients] for part in model.load().train)
    limit, patience = jaxcomp.message_limit(MODEL_CODEC, like), PATIENCE * args.timeout
    async with asyncio.timeout(patience):
        server = await peers.join(port, number, key)
    try:
        while round_ < args.rounds - 1:
            async with asyncio.timeout(patience):
                round_, data = await server.receive(limit, patience)
            theirs, ours = (secret_of(key, round_, way) for way in (b"model", b"change"))
            payload = jaxcomp.from_bytes(MODEL_CODEC, data, like, secret=theirs)
            params = jaxcomp.decode(MODEL_CODEC, round_, payload, like)

            # Depends only on seed, client and round: a client that reconnects takes the same
            # images.
            draw = np.random.default_rng([args.seed, number, round_])
            chosen = draw.integers(len(images), size=(LOCAL_STEPS, BATCH))
            change = model.change_of(params, images[chosen], digits[chosen])
            payload = jaxcomp.encode(codec, round_, change, worker=number)
            await server.send(round_, jaxcomp.to_bytes(codec, payload, like, secret=ours))
    finally:
        await server.close()


def intrude(port: int, garbage: bytes) -> None:
    """A stranger: sends an invalid hello, or nothing, and waits to be disconnected."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=60) as connection,
    ):
        connection.sendall(garbage)
        while connection.recv(2**16):
            pass


async def ask(
    door: peers.Door, params: Any, round_: int, args: argparse.Namespace
) -> tuple[list[Any], int]:
    """One round: the changes of the clients that answered as they should, and the bytes sent."""
    codec, payload = CODECS[args.codec], jaxcomp.encode(MODEL_CODEC, round_, params)
    asked = dict(sorted(door.peers.items()))
    models = {
        number: jaxcomp.to_bytes(
            MODEL_CODEC, payload, params, secret=secret_of(door.keys[number], round_, b"model")
        )
        for number in asked
    }
    answers = await door.ask(round_, models, jaxcomp.message_limit(codec, params))
    changes, sent = [], 0
    for number, data in answers.items():
        ours = secret_of(door.keys[number], round_, b"change")
        try:
            payload = jaxcomp.from_bytes(codec, data, params, secret=ours)
        except jaxcomp.MessageError as error:
            door.refuse(number, asked[number], error)
            continue
        changes.append(jaxcomp.decode(codec, round_, payload, params, worker=number))
        sent += peers.HEADER.size + len(data)
    return changes, sent


async def serve(
    listener: socket.socket, secret: bytes, args: argparse.Namespace, bounds: peers.Bounds
) -> Any:
    """The server: the rounds, and a line for each. Returns the parameters."""
    params, test = model.init(args.seed), model.load().test
    count = sum(leaf.size for leaf in params.values())
    print(f"{args.clients} clients, {count:,} parameters, codec {args.codec}")
    print("round  accuracy  clients  bytes up  bits a parameter  against float32", flush=True)
    door = peers.Door({n: key_of(secret, n) for n in range(args.clients)}, bounds)
    async with await asyncio.start_server(door.welcome, sock=listener):
        await door.wait_for(args.clients, args.timeout)
        for round_ in range(args.rounds):
            await door.wait_for(1, args.timeout)
            if not door.peers:
                raise SystemExit(f"round {round_ + 1}: no client is left")
            changes, sent = await ask(door, params, round_, args)
            if not changes:
                print(f"{round_ + 1:>5}  no client has answered", flush=True)
                continue
            params = model.moved(params, changes)
            bits = 8 * sent / count / len(changes)
            print(
                f"{round_ + 1:>5}  {model.accuracy_of(params, *test):>6.1f} %  "
                f"{len(changes):>7}  {sent:>8,}  {bits:>16.2f}  {32 / bits:>13.1f}x",
                flush=True,
            )
        await door.close()
    return params


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    os.environ["JAX_PLATFORMS"] = "cpu"  # Otherwise the clients compete for an accelerator.
    jax.config.update("jax_platforms", "cpu")
    secret = secrets.token_bytes(32)  # Between machines each client would be given its own key.
    spawn = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for garbage in (b"", os.urandom(1000)):
            threading.Thread(target=intrude, args=(port, garbage), daemon=True).start()
        workers = [
            spawn.Process(
                target=start, args=(number, port, key_of(secret, number), args), daemon=True
            )
            for number in range(args.clients)
        ]
        for worker in workers:
            worker.start()
        asyncio.run(serve(listener, secret, args, peers.Bounds(answer=args.timeout)))
    for worker in workers:
        worker.join(args.timeout)
    failed = [number for number, worker in enumerate(workers) if worker.exitcode != 0]
    if failed:
        raise SystemExit(f"clients {failed} did not end as they should")


if __name__ == "__main__":
    main()
