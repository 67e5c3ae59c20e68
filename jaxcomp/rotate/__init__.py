"""Random rotations: every element of a bucket contributes to every coordinate that is sent."""
