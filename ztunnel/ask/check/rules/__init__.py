"""The rules of ``ztunnel check`` by category. Pure."""
