"""Arithmetic that every codec and reducer shares."""
