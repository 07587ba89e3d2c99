"""Dialects: what control planes send, compiled to ``xds.model``."""
