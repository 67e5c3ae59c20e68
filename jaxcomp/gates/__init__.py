"""Gates, which decide when, and which workers, communicate.

A gate gives the same answer on every worker, because it uses only shared information: the step's
key, a count, or exchanged flags. So its answer may guard collectives, and a closed round sends
nothing at all.
"""

from jaxcomp import lazy

__getattr__, __dir__, __all__ = lazy.exports(__name__)
