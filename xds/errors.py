"""The errors that configuration can cause.

``XdsError``
    ``ConfigError``          a resource, file or message that cannot be obeyed; names the place
        ``Unsupported``      understood to be valid for Envoy, not implemented here
"""


class XdsError(Exception):
    """The base class of all exceptions that this package raises on purpose."""


class ConfigError(XdsError):
    """The configuration cannot be used as it is.

    Attributes:
        path: the location, as field names and indices from the resource's root (``filter_chains[0].filters[1]``);
            the resource itself has an empty path.
        reason: the fault, without the path.
    """

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(reason, path)
        self.reason = reason
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}" if self.path else self.reason

    def under(self, prefix: str) -> "ConfigError":
        """Return the same error with ``prefix`` put before the path."""
        separator = "" if not self.path or self.path.startswith("[") else "."
        return type(self)(self.reason, f"{prefix}{separator}{self.path}")


class Unsupported(ConfigError):
    """The configuration has a field or an extension of Envoy that this proxy does not implement. It is refused,
    because a partial effect would mislead its author.
    """
