"""Parameters as the arrays that receivers read: names, layouts, dtypes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.types import PyTree
from jaxcomp_weights import patterns

Export = Callable[[PyTree], dict[str, jax.Array]]


def compiled(export: Export | None, dtype: Any) -> Callable[[PyTree], dict[str, jax.Array]]:
    """The export as one program, whose results are copies: parameters may be donated afterwards.

    Args:
        export: from parameters to arrays by name; None for paths joined by `/`.
        dtype: of floating arrays; None for their own.
    """

    def run(params: PyTree) -> dict[str, jax.Array]:
        named = by_path(params) if export is None else export(params)
        _check(named)
        return {name: _cast(jnp.asarray(array), dtype) for name, array in named.items()}

    return jax.jit(run)


def by_path(params: PyTree) -> dict[str, Any]:
    """Leaves by their paths, joined by `/`.

    Example:
        >>> sorted(by_path({"layer": {"w": 1, "b": 2}}))
        ['layer/b', 'layer/w']
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}
    if len(named) < len(leaves):
        raise ValueError("`params` must have paths that differ when joined by '/', got two equal")
    return named


def check_dtype(dtype: Any) -> None:
    """Raises `ValueError` unless it is None or a floating dtype that can be published."""
    if dtype is None:
        return
    name = jnp.dtype(dtype).name
    if name not in patterns.FORMATS or not jnp.issubdtype(dtype, jnp.floating):
        floating = [name for name in patterns.FORMATS if "float" in name]
        raise ValueError(f"`dtype` must be None or one of {', '.join(floating)}, got {name}")


def _check(named: Any) -> None:
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named):
        raise ValueError(
            "`export` must return a dict from names to arrays, got "
            f"{type(named).__name__ if not isinstance(named, dict) else list(named)[:3]}"
        )
    if not named:
        raise ValueError("`params` must have at least one array, got none")
    for name, array in named.items():
        found = jnp.asarray(array).dtype.name
        if found not in patterns.FORMATS:
            raise ValueError(
                f"`params` must have arrays of {', '.join(patterns.FORMATS)}, got {found} in "
                f"{name!r}; cast it in `export`"
            )


def _cast(array: jax.Array, dtype: Any) -> jax.Array:
    if dtype is not None and jnp.issubdtype(array.dtype, jnp.floating):
        array = array.astype(dtype)
    return jnp.array(array, copy=True)  # Otherwise jit returns an argument as it is.
