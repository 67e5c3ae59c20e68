"""A worker of PyTorch's data-parallel wrapper over gloo, with the hooks that it comes with.

It does what `mean.py` and `train.py` do: one large mean, timed from the start of the backward pass,
which hands out a gradient that is given, to its end; or the training of the same model on the same
batches, by the same optimizer.
"""

import os
from collections.abc import Callable
from typing import Any

import byte_lm  # pyright: ignore[reportMissingImports]
import group
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torch_model
import train
from torch import distributed, nn  # pyright: ignore[reportMissingImports]
from torch.distributed.algorithms.ddp_comm_hooks import (  # pyright: ignore[reportMissingImports]
    default_hooks,
    powerSGD_hook as low_rank,
)
from torch.nn.parallel import DistributedDataParallel  # pyright: ignore[reportMissingImports]

RANK = 4
START = 2
"""Steps that PowerSGD sends dense: the least that its hook takes, a thousand is its default."""


def power() -> tuple[Any, Any]:
    state = low_rank.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=START)
    return state, low_rank.powerSGD_hook


HOOKS: dict[str, Callable[[], Any]] = {
    "torch DDP": lambda: None,
    "torch DDP, fp16_compress_hook": lambda: (None, default_hooks.fp16_compress_hook),
    f"torch DDP, powerSGD_hook rank {RANK}": power,
}
ONE_BUCKET = 1024
"""Megabytes. The low-rank hook begins a collective when another has ended: with several buckets the
workers do so in different orders, and gloo ends the program."""


def wrapped(module: nn.Module, hook: Any) -> DistributedDataParallel:
    alone = ONE_BUCKET if hook is not None and hook[1] is low_rank.powerSGD_hook else None
    made = DistributedDataParallel(module, bucket_cap_mb=alone, gradient_as_bucket_view=True)
    if hook is not None:
        made.register_comm_hook(*hook)
    return made


class Given(torch.autograd.Function):
    """A loss of one parameter, whose gradient is given."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor, None]:
        return ctx.gradient, None


class Matrix(nn.Module):
    def __init__(self, shape: tuple[int, int]):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return Given.apply(self.weight, gradient)


def mean(own: dict[str, Any], hook: Any, meet: Callable[[], Any]) -> dict[str, Any]:
    shape = group.matrix(own["elements"])
    drawn = np.random.default_rng(own["rank"]).standard_normal(shape, np.float32)
    gradient, module = torch.from_numpy(drawn), wrapped(Matrix(shape), hook)
    loss = module(gradient)

    def run() -> None:
        nonlocal loss
        loss.backward()
        module.zero_grad(set_to_none=True)
        loss = module(gradient)  # It costs nothing, and no later one waits for it.

    return group.timed(run, meet, own["repeats"], warm=START + 1)


def training(
    own: dict[str, Any], hook_of: Callable[[], Any], data: tuple, meet: Callable[..., float]
) -> dict[str, Any]:
    draw, held_out = data
    score_of = nn.CrossEntropyLoss()
    rates = np.asarray(byte_lm.warm_and_decay(train.RATE, own["steps"])(np.arange(own["steps"])))

    def loss_of(net: nn.Module, batch: tuple) -> torch.Tensor:
        inputs, targets = (torch.from_numpy(half).long() for half in batch)
        return score_of(net(inputs).flatten(0, 1), targets.flatten())

    def begin(seed: int) -> tuple[Callable[[int], Any], Callable[[], float]]:
        torch.manual_seed(seed)
        module = torch_model.ByteModel(train.LAYERS, train.WIDTH)
        parameters = sum(weight.numel() for weight in module.parameters())
        if parameters != train.parameters():
            raise RuntimeError(f"{parameters} parameters here, and {train.parameters()} in JAX")
        model = wrapped(module, hook_of())
        adam = torch.optim.Adam(model.parameters())

        def step(number: int) -> None:
            adam.param_groups[0]["lr"] = float(rates[number - 1])
            adam.zero_grad(set_to_none=True)
            loss_of(model, draw(number, seed)).backward()
            adam.step()

        @torch.no_grad()
        def score() -> float:
            windows = len(held_out[0])
            parts = [tuple(half[i : i + 32] for half in held_out) for i in range(0, windows, 32)]
            return float(np.mean([loss_of(module, part).item() for part in parts]) / np.log(2))

        return step, score

    return {"parameters": train.parameters(), **train.races(begin, own, meet)}


def main() -> None:
    own = group.place()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    at = f"tcp://{own['address']}:{own['port']}"
    distributed.init_process_group(
        "gloo", init_method=at, rank=own["rank"], world_size=own["processes"]
    )

    def meet(value: float = 0.0) -> float:
        total = torch.tensor([value])
        distributed.all_reduce(total)
        return float(total) / own["processes"]

    what = own["what"]
    data = train.batches(own) if what == "train" else ()
    found = {}
    for name in group.chosen(own, HOOKS):
        if what == "mean":
            found[name] = mean(own, HOOKS[name](), meet)
            group.say(own, f"{np.median(found[name]['seconds']):8.3f} s  {name}")
        else:
            found[name] = training(own, HOOKS[name], data, meet)
            train.say(own, name, found[name]["curves"])
    group.finish(own, {"methods": found})
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
