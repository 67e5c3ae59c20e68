"""A reader of `weights.py`, in a process of its own: reads weights, and answers with the newest.

It imports numpy and `jaxcomp_weights`, and no JAX. It writes a line for each batch of answers.
"""

import argparse
import hashlib
import json
import pathlib
import sys
import time
from typing import Any

import aiohttp
import numpy as np
import weights_model as model

from jaxcomp_weights import Reader

BATCH, PAUSE = 32, 0.25


class Count:
    """Counts the bytes that fsspec receives over HTTP."""

    def __init__(self) -> None:
        self.bytes = 0
        trace = aiohttp.TraceConfig()
        trace.on_response_chunk_received.append(self._add)
        self.options = {"client_kwargs": {"trace_configs": [trace]}}

    async def _add(self, session: Any, context: Any, params: Any) -> None:
        self.bytes += len(params.chunk)


def digests(weights: dict[str, np.ndarray]) -> dict[str, str]:
    """The SHA-256 of each leaf's bits."""
    return {name: hashlib.sha256(x.tobytes()).hexdigest() for name, x in sorted(weights.items())}


def run(url: str, folder: pathlib.Path, number: int) -> None:
    """Answers until the file `stop` is there."""
    count, draw, last = Count(), np.random.default_rng(), None
    reader, params = Reader(url, options=count.options), {}
    with (folder / f"reader{number}.jsonl").open("a") as log:
        while not (folder / "stop").exists():
            begin = time.time()
            weights, version = reader.update()
            fetched = time.time() - begin
            if version != last:
                wanted = json.loads((folder / "sha256" / f"{version}.json").read_text())
                if digests(weights) != wanted:
                    raise SystemExit(f"version {version} has other bits than the trainer's")
                params = {name: x.astype(np.float32) for name, x in weights.items()}
            prompts, right = model.problems(draw, BATCH)
            reward = np.mean(np.all(model.answer(params, prompts, draw) == right, 1))
            now, published = time.time(), reader.published or 0.0
            row = {
                "time": now,
                "version": version,
                "step": reader.step,
                "age": now - published,
                "bytes": count.bytes,
                "fetch_seconds": fetched,
                "checked": version != last,
                "reward": float(reward),
                "has_jax": "jax" in sys.modules,
            }
            log.write(json.dumps(row) + "\n")
            log.flush()
            last = version
            time.sleep(PAUSE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--url", required=True, help="of the weights")
    parser.add_argument("--folder", required=True, type=pathlib.Path, help="of logs and digests")
    parser.add_argument("--number", required=True, type=int, help="of this reader")
    args = parser.parse_args()
    run(args.url, args.folder, args.number)


if __name__ == "__main__":
    main()
