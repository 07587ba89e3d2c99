"""The client side of gRPC's health checking protocol (``grpc.health.v1``)."""

from typing import Final

from xds.aio.channel import Channel

_CHECK: Final = "/grpc.health.v1.Health/Check"
#: An encoded HealthCheckResponse with the status SERVING: field 1, a varint.
_SERVING: Final = b"\x08\x01"


async def serves(channel: Channel, service: str, timeout_s: float) -> bool:
    """Return whether a server reports SERVING for a service. An empty name stands for the server as a whole.

    Raises:
        RpcFailed: the answer is late or invalid; NOT_FOUND for a service that the server does not know.
        XdsError: there is no connection to the server.
    """
    name = service.encode()
    request = b"\x0a" + _varint(len(name)) + name if name else b""
    return (await channel.unary(_CHECK, request, timeout_s=timeout_s)).startswith(_SERVING)


def _varint(value: int) -> bytes:
    """Return a number as protobuf encodes it."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
