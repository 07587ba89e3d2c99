"""Readers of what people write: YAML, flags and values as programs in Go read them."""
