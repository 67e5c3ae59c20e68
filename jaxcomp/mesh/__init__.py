"""Training steps and their state on a mesh of devices."""
