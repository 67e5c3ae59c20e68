"""The former home of `jaxcomp.adapters.flower`, for one version."""

import importlib
from typing import Any

from jaxcomp import checks

checks.warn_of_former("federated.flower", "adapters.flower")


def __getattr__(name: str) -> Any:
    # By name: adapters are above this package, which must not import them.
    return getattr(importlib.import_module("jaxcomp.adapters.flower"), name)
