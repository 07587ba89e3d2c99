"""The error of a gRPC server that cannot serve an address; without gRPC's library, which takes 13 MiB."""

from xds.errors import XdsError


class ServeError(XdsError):
    """An address cannot be served.

    Attributes:
        address: as given.
    """

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(address, reason)
        self.address = address
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot serve on {self.address}: {self.reason}"
