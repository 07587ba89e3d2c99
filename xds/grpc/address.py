"""Addresses of gRPC servers: ``host:port``, with IPv6 hosts in brackets, or ``unix:/path``."""

import ipaddress

from xds.digits import whole_number


def host_and_port(text: str, *, least_port: int = 1) -> tuple[str, int]:
    """Split ``host:port`` and return both, the host without brackets.

    Raises:
        ValueError: ``text`` has another form, or the port is not between ``least_port`` and 65535.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    number = whole_number(port, 65535)
    if not colon or number is None or number < least_port or (":" in host and not bracketed):
        raise ValueError(f"{text!r} is neither host:port nor unix:/path")
    if bracketed:
        host = host[1:-1]
        ipaddress.IPv6Address(host)
    if not host:
        raise ValueError(f"{text!r} has no host")
    return host, number
