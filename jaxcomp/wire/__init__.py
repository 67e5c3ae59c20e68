"""Payloads on the wire: one buffer, its bytes, and the bytes of a compiled program."""
