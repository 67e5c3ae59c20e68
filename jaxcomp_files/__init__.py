"""Files that survive kills: numbered versions in a folder, and its lock; imports no JAX."""
