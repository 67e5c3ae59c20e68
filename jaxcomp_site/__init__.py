"""The processes of a site between Flower and its training; imports no JAX."""
