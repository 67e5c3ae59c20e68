"""Papers as expressions: each recipe is a short composition of parts, with its reference."""
