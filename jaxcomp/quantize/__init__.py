"""The parts of a quantizer: a scale for each bucket, a set of levels, a rule of rounding."""
