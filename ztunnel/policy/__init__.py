"""The policy engine: decides whether a connection is allowed."""
