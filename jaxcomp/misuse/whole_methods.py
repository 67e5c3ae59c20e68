"""Methods of `jaxcomp.algorithms` that take the descent step themselves."""

import functools
from collections.abc import Callable
from typing import ParamSpec

import optax

from jaxcomp import checks

_Settings = ParamSpec("_Settings")


def whole(
    method: Callable[_Settings, optax.GradientTransformationExtraArgs],
) -> Callable[_Settings, optax.GradientTransformationExtraArgs]:
    """Decorates a method that includes its own descent step: checks its learning rate."""

    @functools.wraps(method)
    def make(
        *args: _Settings.args, **kwargs: _Settings.kwargs
    ) -> optax.GradientTransformationExtraArgs:
        if "learning_rate" in kwargs:
            checks.rate(kwargs["learning_rate"])
        return method(*args, **kwargs)

    return make
