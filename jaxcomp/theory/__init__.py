"""Theoretical limits for codecs, and models of cost."""
