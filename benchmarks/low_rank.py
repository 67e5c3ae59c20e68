"""Times one reduction by PowerSGD and by PyTorch's own hook, without a slow link.

    python benchmarks/low_rank.py

One worker has the gradient of one square matrix. Both keep a residual and start from the factor of
the step before; what is left to time is the two products with the factors, their orthonormal basis,
and the residual. torch's hook is called as its data-parallel wrapper does it, with a group of one.
"""

import datetime
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import reporting
import timing

import jaxcomp


def bucket_of(parameter: Any, flat: Any) -> Any:
    """The interface of a gradient bucket that torch's hook uses; only its wrapper makes one."""
    return types.SimpleNamespace(
        buffer=lambda: flat,
        gradients=lambda: [flat.view_as(parameter)],
        parameters=lambda: [parameter],
        index=lambda: 0,
        is_last=lambda: True,
    )


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
    bucket = bucket_of(torch.nn.Parameter(there), buffer.reshape(-1))

    def run():
        buffer.copy_(there.reshape(buffer.shape))  # The mean overwrites the gradient.
        return hooks.powerSGD_hook(state, bucket).wait()

    return run


COLUMNS = "what {name} | rank {rank} | ms {ms:.1f} | copies {copies:.1f}"


def measure(gradient: np.ndarray, rank: int, repeats: int) -> dict[str, float]:
    runs = {
        "copy": timing.copy_of(gradient),
        "PowerIteration": ours(gradient, rank),
        "PowerIteration, alternate": ours(gradient, rank, alternate=True),
    }
    try:
        runs["torch powerSGD_hook"] = torch_hook(gradient, rank)
    except ImportError:
        print("torch is not installed, and left out: pip install '.[peers]'")
    return {name: took.median for name, took in timing.in_turns(runs, repeats).items()}


def main() -> None:
    options = reporting.options(
        __doc__,
        "out/bench",
        side=(5000, "of the matrix"),
        rank=([1, 4, 16], "of the approximation"),
        repeats=(9, "runs that a median is taken over"),
    )
    gradient = np.random.default_rng(0).standard_normal((options.side,) * 2, np.float32)
    results = {rank: measure(gradient, rank, options.repeats) for rank in options.rank}
    records = [
        {"name": name, "rank": rank, "ms": 1e3 * seconds, "copies": seconds / times["copy"]}
        for rank, times in results.items()
        for name, seconds in times.items()
        if name != "copy"
    ]
    title = f"One reduction of a {options.side:,} × {options.side:,} matrix, one worker"
    table = reporting.Table(title, COLUMNS, records)
    reporting.show(table, {"seconds": results}, options.out / "low_rank.md")


if __name__ == "__main__":
    main()
