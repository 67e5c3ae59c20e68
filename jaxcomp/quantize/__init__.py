"""The parts of a quantizer: scales, levels, roundings and steps."""
