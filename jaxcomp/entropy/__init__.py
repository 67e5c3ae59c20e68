"""Codes of variable length, written and read by all lanes at once."""
