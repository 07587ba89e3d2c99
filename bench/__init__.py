"""Measurements of speed; see README.md."""
