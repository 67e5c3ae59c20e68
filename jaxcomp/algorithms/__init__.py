"""Distributed methods by their names: links, a reducer and a gate, chained with plain optax.

Each takes the codec and the axis as `compressed_mean` does, and the step in place of an optimizer.
A bare codec leaves small and one-dimensional leaves dense; a `Policy` says otherwise. What a method
assumes of the codec is checked where the parts meet. A mean over workers is a mean, so a learning
rate is that of the mean loss.
"""
