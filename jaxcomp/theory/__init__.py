"""Limits that codecs are measured against, and models of cost."""
