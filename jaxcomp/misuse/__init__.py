"""Refuses wrong use that would train wrongly without an error."""
