"""Readers of operators' input: YAML, flags and values. They parse it like Go programs do."""
