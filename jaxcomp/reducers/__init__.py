"""Reducers: how the links of all workers become one mean."""
