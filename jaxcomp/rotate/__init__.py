"""Random rotations: every element of a bucket shares in every coordinate that is sent."""
