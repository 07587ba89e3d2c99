"""The error of a gRPC server that cannot listen on an address.

This is a separate module, so that commands can catch the error without importing the gRPC library (13 MiB).
"""

from xds.errors import XdsError


class ServeError(XdsError):
    """The server cannot listen on an address.

    Attributes:
        address: the address, as given by the caller.
    """

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(address, reason)
        self.address = address
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot serve on {self.address}: {self.reason}"
