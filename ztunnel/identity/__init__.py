"""Certificates: where they come from, what is built of them, how a peer's is judged."""
