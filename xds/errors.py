"""Errors of the configuration side.

``XdsError``
    ``ConfigError``          a resource, file or message that cannot be obeyed; names the place
        ``Unsupported``      understood to be valid for Envoy, not implemented here
"""


class XdsError(Exception):
    """Root of everything this package raises on purpose."""


class ConfigError(XdsError):
    """Configuration that cannot be obeyed.

    Attributes:
        path: where, as field names and indices from the resource's root (``filter_chains[0].filters[1]``);
            empty for the resource itself.
        reason: what is wrong, without the path.
    """

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(reason, path)
        self.reason = reason
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}" if self.path else self.reason

    def under(self, prefix: str) -> "ConfigError":
        """The same error seen from further out: ``prefix`` put before the path."""
        separator = "" if not self.path or self.path.startswith("[") else "."
        return type(self)(self.reason, f"{prefix}{separator}{self.path}")


class Unsupported(ConfigError):
    """A field or extension that Envoy has and this proxy does not; obeying half of it would be a lie."""
