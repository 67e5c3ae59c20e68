"""Federated training: many clients, few bytes, one server.

A `Method` says what a client does, how it sends, and what the server makes of it; a `Simulation`
runs it over any number of clients on the devices that there are.
"""

from jaxcomp import lazy

__getattr__, __dir__, __all__ = lazy.exports(__name__)
