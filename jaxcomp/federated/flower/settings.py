"""Settings of the strategy that a method has a use for, or not."""

from collections.abc import Mapping
from typing import Any

from jaxcomp.federated.method import Method


def check(
    method: Method, clients: int, weighted_by_key: str | None, settings: Mapping[str, Any]
) -> None:
    """Refuses settings that a method has no use for, instead of ignoring them."""
    method.sampling.expected(clients)  # Raises if it needs more clients.
    for name in ("fraction_train", "min_train_nodes"):
        if name in settings:
            raise ValueError(
                f"`{name}` must be left out: how many clients take part is the method's, such as "
                f"Method(sampling=jaxcomp.federated.Exactly(10)), got {settings[name]!r}"
            )
    if weighted_by_key is not None and not (isinstance(weighted_by_key, str) and weighted_by_key):
        raise ValueError(
            "`weighted_by_key` must be the name of a number that clients report, such as "
            f"'num-examples', or None, got {weighted_by_key!r}"
        )
    if weighted_by_key is not None and method.mean == "all":
        raise ValueError(
            '`weighted_by_key` must be None with a mean over "all", which is divided by the '
            f"expected weight of all clients before any of them reports, got {weighted_by_key!r}; "
            "give `weights`"
        )
