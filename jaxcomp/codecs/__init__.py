"""Codecs: one batch of buckets ↔ the payload that crosses the wire."""
