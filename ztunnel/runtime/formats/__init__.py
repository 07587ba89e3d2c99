"""Readers of operators' input: YAML, flags and values, parsed as Go programs parse them."""
