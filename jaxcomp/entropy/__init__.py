"""Codes of variable length, encoded and decoded in parallel lanes."""
