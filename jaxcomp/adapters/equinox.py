"""Equinox: modules, whose leaves may be functions and settings."""

import sys
from typing import final

from jaxcomp.base.adapter import Adapter


@final
class Equinox(Adapter):
    """Modules can be arguments and results of a step: leaves that are not arrays are static."""

    module = "equinox"
    complete = "__version__"

    @property
    def modules(self) -> tuple[type, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (sys.modules["equinox"].Module,)
