"""A byte model that sites train together."""
