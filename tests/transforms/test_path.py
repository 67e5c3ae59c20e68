"""The call stack of a gradient is short."""

import pathlib
import traceback

import jax
import jax.numpy as jnp

import jaxcomp
from jaxcomp.quantize import totals


def test_few_frames_lie_between_the_update_and_the_first_arithmetic(monkeypatch):
    """`update` itself and the function with the arithmetic count too."""
    stacks = []
    scale = totals.max_abs

    def max_abs(x, *rest, **settings):
        stacks.append(traceback.extract_stack())
        return scale(x, *rest, **settings)

    tx = jaxcomp.compressed_mean(jaxcomp.qsgd_inf(bits=4), axis_name="data")
    state = tx.init({"w": jnp.ones((64, 64))})
    monkeypatch.setattr(totals, "max_abs", max_abs)
    update = jax.vmap(lambda grads: tx.update(grads, state)[0], axis_name="data")
    jax.eval_shape(update, {"w": jnp.ones((8, 64, 64))})
    package = str(pathlib.Path(jaxcomp.__file__).parent)
    found = [[frame for frame in stack if frame.filename.startswith(package)] for stack in stacks]
    # Before it encodes the gradient, the plan asks for the shapes of payloads.
    own = next(stack for stack in found if "_payload_of_one" not in [frame.name for frame in stack])
    assert own[0].name == "update_fn"
    assert len(own) + 1 <= 11, [f"{frame.name} in {frame.filename}" for frame in own]
    assert len({frame.filename for frame in own}) + 1 <= 12
