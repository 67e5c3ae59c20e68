"""The parts of a sparsifier: rules that choose elements, and encodings of their indices."""
