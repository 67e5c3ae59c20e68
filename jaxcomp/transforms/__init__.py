"""Gradient transformations that a user chains with optax."""
