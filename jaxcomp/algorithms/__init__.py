"""Distributed methods by their names: links, a reducer and a gate, chained with plain optax.

The codec comes first and the axis second, as in `compressed_mean`. Most methods return a mean of
the workers' gradients, and an optimizer follows:
`optax.chain(jaxcomp.algorithms.ef21(codec, "data"), optax.sgd(0.1))`. A method with a
`learning_rate` or an inner optimizer takes the descent step itself, so no optimizer follows it.
With a bare codec, small and one-dimensional leaves stay dense; a `Policy` changes that. A method
checks its assumptions about the codec when it is built. Gradients are averaged over workers, not
summed, so the learning rate is that of the mean loss.
"""

from jaxcomp import lazy

__getattr__, __dir__, __all__ = lazy.exports(__name__)
