"""The claims of the methods that the library implements, and how each is tried here.

Each module is a family and has `CLAIMS`, a tuple of `claim.Claim`; the first line of its docstring
is the heading of its section in docs/reproductions.md. A module without `CLAIMS` is a driver.
"""
