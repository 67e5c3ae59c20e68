"""PowerSGD beside PyTorch's own hook: the time of one reduction where no link is slow.

    python benchmarks/low_rank.py

One worker has the gradient of one square matrix. Both keep a residual and start from the factor of
the step before; what is left to time is the two products with the factors, their orthonormal basis,
and the residual. torch's hook is called as its data-parallel wrapper does it, with a group of one.
"""

import argparse
import datetime
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import median_times, show

import jaxcomp


class Bucket:
    """What torch's hook asks of a bucket of gradients, which only its wrapper can make."""

    def __init__(self, parameter: Any, gradient: Any):
        self._parameter, self._flat = parameter, gradient.reshape(-1)

    def buffer(self) -> Any:
        return self._flat

    def gradients(self) -> list[Any]:
        return [self._flat.view_as(self._parameter)]

    def parameters(self) -> list[Any]:
        return [self._parameter]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def ours(gradient: np.ndarray, rank: int, alternate: bool = False) -> Callable[[], Any]:
    tx = jaxcomp.compressed_mean(jaxcomp.PowerIteration(rank=rank, alternate=alternate), "workers")
    many = jnp.asarray(gradient)[None]
    update = jax.vmap(tx.update, axis_name="workers")
    step = jax.jit(lambda mean, state, g: update(g, state), donate_argnums=(0, 1), keep_unused=True)
    state = jax.vmap(tx.init, axis_name="workers")(many)
    held = [jnp.zeros_like(many), jax.tree.map(jnp.copy, state)]

    def run():
        held[:] = jax.block_until_ready(step(*held, many))
        return held[0]

    return run


def torch_hook(gradient: np.ndarray, rank: int) -> Callable[[], Any]:
    import torch  # pyright: ignore[reportMissingImports]
    from torch import distributed  # pyright: ignore[reportMissingImports]
    from torch.distributed.algorithms.ddp_comm_hooks import (  # pyright: ignore[reportMissingImports]
        powerSGD_hook as hooks,
    )

    if not distributed.is_initialized():
        alone = distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        distributed.init_process_group(
            "gloo", store=alone, rank=0, world_size=1, timeout=datetime.timedelta(minutes=1)
        )
    state = hooks.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    state.iter = 2
    there = torch.from_numpy(gradient)
    buffer = there.clone()
    bucket: Any = Bucket(torch.nn.Parameter(there), buffer)

    def run():
        buffer.copy_(there.reshape(buffer.shape))  # The mean is written over the gradient.
        return hooks.powerSGD_hook(state, bucket).wait()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--side", type=int, default=5000, help="of the matrix")
    add("--rank", type=int, nargs="+", default=[1, 4, 16])
    add("--repeats", type=int, default=9)
    add("--out", type=pathlib.Path, default=pathlib.Path("out/bench"))
    options = parser.parse_args()
    gradient = np.random.default_rng(0).standard_normal((options.side,) * 2, np.float32)
    other = np.empty_like(gradient)
    rows, results = [], {}
    for rank in options.rank:
        runs = {
            "copy": lambda: np.copyto(other, gradient),
            "PowerIteration": ours(gradient, rank),
            "PowerIteration, alternate": ours(gradient, rank, alternate=True),
        }
        try:
            runs["torch powerSGD_hook"] = torch_hook(gradient, rank)
        except ImportError:
            print("torch is not installed, and left out: pip install '.[peers]'")
        times = dict(zip(runs, median_times(list(runs.values()), options.repeats), strict=True))
        results[rank] = times
        for name in list(runs)[1:]:
            copies = times[name] / times["copy"]
            rows.append((name, str(rank), f"{1e3 * times[name]:.1f}", f"{copies:.1f}"))
    title = f"One reduction of a {options.side:,} × {options.side:,} matrix, one worker"
    columns = ("what", "rank", "ms", "copies")
    show(title, columns, rows, {"seconds": results}, options.out / "low_rank.md")


if __name__ == "__main__":
    main()
