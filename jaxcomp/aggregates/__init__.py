"""Aggregates, which combine the messages of all workers, and tolerate Byzantine ones.

`jaxcomp.Robust(link, aggregate)` applies one to decoded payloads; `combine`, and `zero_total` with
`add` and `mean_of`, do it on a server.
"""

from jaxcomp import lazy

__getattr__, __dir__, __all__ = lazy.exports(__name__)
