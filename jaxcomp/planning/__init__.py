"""Forecasts: which bytes a step sends, how long it takes, and whether compression pays."""
