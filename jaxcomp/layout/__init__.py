"""Leaves of a tree as batches of buckets, and the policy that chooses a codec for each."""
