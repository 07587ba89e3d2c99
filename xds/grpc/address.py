"""Addresses of gRPC servers: ``host:port``, with IPv6 hosts in brackets, or ``unix:/path``."""

import ipaddress


def host_and_port(text: str, *, least_port: int = 1) -> tuple[str, int]:
    """Split ``host:port`` and return both, the host without brackets.

    Raises:
        ValueError: ``text`` has another form, or the port is not between ``least_port`` and 65535.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else -1
    if not colon or not least_port <= number <= 65535 or (":" in host and not bracketed):
        raise ValueError(f"{text!r} is neither host:port nor unix:/path")
    if bracketed:
        host = host[1:-1]
        ipaddress.IPv6Address(host)
    if not host:
        raise ValueError(f"{text!r} has no host")
    return host, number
