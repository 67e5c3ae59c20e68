"""Adapters of frameworks: all that the library knows about them."""
