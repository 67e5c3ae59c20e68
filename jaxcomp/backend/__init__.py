"""The compiler and the collectives of JAX: what only they care about."""
