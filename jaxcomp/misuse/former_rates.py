"""Methods that return means still take a `learning_rate`, with a warning, for one version."""

import functools
from collections.abc import Callable
from typing import ParamSpec

import optax

from jaxcomp import checks
from jaxcomp.misuse import whole_methods

_Settings = ParamSpec("_Settings")
_Method = optax.GradientTransformationExtraArgs
_Maker = Callable[_Settings, _Method]


def returns_mean(method: _Maker[_Settings]) -> _Maker[_Settings]:
    """Decorates a method that returns a mean; the former call adds `optax.sgd(learning_rate)`."""

    def stepped(*args, learning_rate, **kwargs) -> _Method:
        return optax.chain(method(*args, **kwargs), optax.sgd(learning_rate))

    return formerly(stepped)(method)


def formerly(
    stepped: Callable[..., _Method],
) -> Callable[[_Maker[_Settings]], _Maker[_Settings]]:
    """The same for a method whose former call, with `learning_rate`, made `stepped(...)`."""

    def decorate(method: _Maker[_Settings]) -> _Maker[_Settings]:
        name = f"algorithms.{method.__name__}"

        @functools.wraps(method)
        def make(*args: _Settings.args, **kwargs: _Settings.kwargs) -> _Method:
            if "learning_rate" not in kwargs:
                return method(*args, **kwargs)
            checks.rate(kwargs["learning_rate"])
            checks.warn_of_former(
                f"{name}(..., learning_rate=rate)",
                f"{name}(...), a mean, as in optax.chain(jaxcomp.{name}(...), optax.sgd(rate))",
            )
            return whole_methods.last(stepped(*args, **kwargs), method.__name__)

        return make

    return decorate
