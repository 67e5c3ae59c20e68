"""Type names for the methods' arguments and results."""

from collections.abc import Callable
from typing import Any

import optax

from jaxcomp.base import Codec, Reducer
from jaxcomp.feedback import Link
from jaxcomp.layout.policy import Policy

Method = optax.GradientTransformationExtraArgs
Rate = Any
"""A learning rate: a number, or an optax schedule."""
Over = Callable[[Link], Reducer]
"""A function that makes a reducer of one link, such as `Gather` or `TwoShot`."""
Mean = Codec | Policy | Link | Reducer
"""The codec, policy, link or reducer that averages, as for `compressed_mean`."""
