"""Helpers that only concern the compiler and the collectives of JAX."""
