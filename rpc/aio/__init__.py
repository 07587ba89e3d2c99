"""Connections, client and server of gRPC on asyncio."""
