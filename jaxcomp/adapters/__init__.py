"""Adapters of frameworks: all that the library knows about flax, equinox, Keras and Flower.

None of them imports a framework before the user does. `jaxcomp.adapters.flower`, which needs
`pip install '.[flower]'` in a clone, and `jaxcomp.adapters.keras` are modules to import.
"""

from jaxcomp.adapters import equinox, linen, nnx
from jaxcomp.base import adapter as _adapter

for _known in (linen.Linen(), nnx.Nnx(), equinox.Equinox()):
    _adapter.register(_known)
