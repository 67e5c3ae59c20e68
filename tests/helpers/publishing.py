"""A publisher and readers that a test kills: `tests/weights/test_kills.py`.

    python tests/helpers/publishing.py publish|read FOLDER LOG VERSIONS

A server imports JAX, and forks a process for each line on its input: `NAME`. It answers with the
number of the process, and waits for the ones before. Nothing of JAX is used before the fork.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import signal
import sys
import time

import numpy as np

ROWS, HIDDEN = 24, 40


def digests(weights):
    """The SHA-256 of each leaf."""
    return {
        name: hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()
        for name, leaf in sorted(weights.items())
    }


def log(path, found):
    """Appends a line, which is on the disk when this returns."""
    with open(path, "ab") as file:
        file.write(json.dumps(found).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def lines(path):
    """The lines of a log; the last one may be cut by a kill."""
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def publish(folder, path, versions):
    """Trains from the newest version on, by Adam, whose moments begin anew."""
    import jax
    import jax.numpy as jnp
    import optax

    from jaxcomp.weights import Publisher
    from jaxcomp_weights import Reader, WeightsError

    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((64, ROWS)), draw.standard_normal((64, 1))
    params = {
        "in": jnp.asarray(draw.standard_normal((ROWS, HIDDEN)) / 5, jnp.float32),
        "out": jnp.asarray(draw.standard_normal((HIDDEN, 1)) / 6, jnp.float32),
        "bias": jnp.zeros(HIDDEN, jnp.bfloat16),
    }
    with Publisher(folder, snapshot_every=16, keep=24, skips=(8,)) as publisher:
        reader, step = Reader(folder), 0
        with contextlib.suppress(WeightsError):
            weights, _ = reader.update()
            params = {name: jnp.asarray(leaf) for name, leaf in weights.items()}
            step = reader.step + 1
        tx = optax.adam(1e-3)

        def loss(p):
            return jnp.mean((jnp.tanh(x @ p["in"] + p["bias"]) @ p["out"] - y) ** 2)

        @jax.jit
        def train(p, state):
            moves, state = tx.update(jax.grad(loss)(p), state)
            return optax.apply_updates(p, moves), state

        state = tx.init(params)
        while (publisher.version or 0) < versions:
            params, state = train(params, state)
            log(path, [step, digests(params)])
            publisher.publish(params, step)
            publisher.flush()
            step += 1


def read(folder, path, versions):
    """Polls until the last version is there."""
    from jaxcomp_weights import Reader, VersionGap, WeightsError

    reader, seen = Reader(folder), None
    while seen is None or seen < versions:
        try:
            weights, number = reader.update(wait=0.2)
        except VersionGap as error:
            log(path, ["gap", str(error)])
            time.sleep(0.1)
            continue
        except WeightsError as error:
            if "nothing is published" not in str(error):
                raise
            time.sleep(0.05)
            continue
        if number != seen:
            seen = number
            log(path, [os.getpid(), number, reader.step, digests(weights)])


def serve(work):
    """Forks a process for each line."""
    import jax  # noqa: F401
    import optax  # noqa: F401

    import jaxcomp.weights  # noqa: F401
    import jaxcomp_weights  # noqa: F401

    for _ in sys.stdin:
        if number := os.fork():
            print(number, flush=True)
            _, status = os.waitpid(number, 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
        else:
            code = 1
            try:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                work()
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            os._exit(code)


if __name__ == "__main__":
    way, folder, path, versions = sys.argv[1:]
    work = {"publish": publish, "read": read}[way]
    serve(lambda: work(folder, pathlib.Path(path), int(versions)))
