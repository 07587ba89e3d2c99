"""SPIFFE certificates: issued, requested, revoked, and read from a peer's chain."""
