"""What a quantizer is made of: a scale for each bucket, a set of levels, a rule of rounding."""
