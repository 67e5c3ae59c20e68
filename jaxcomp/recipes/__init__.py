"""Recipes: each is a method of a paper as a short composition of parts, with its reference."""
