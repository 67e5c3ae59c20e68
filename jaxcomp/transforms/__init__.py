"""The optax edge: gradient transformations that a user chains."""
