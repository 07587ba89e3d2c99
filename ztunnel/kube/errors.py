"""The errors between a reader of objects and the API server.

::

    KubeError
    ├── BadKubeconfig     no usable kubeconfig, service account or CA file: a person must act
    ├── ApiUnreachable    no answer: no connection, no trust in the server's certificate, silence
    ├── BadAnswer         the answer does not follow the Kubernetes API
    └── ApiRefused        the API server answered with an error status
        └── WatchFailed   an event of a watch has this error; the watch has ended

Each text is one line that names the server or file and what to look at.
"""


class KubeError(Exception):
    """Base class of the errors that the client raises."""


class BadKubeconfig(KubeError):
    """The configuration of the client cannot be used."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(place, reason)
        self.place = place
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


class ApiUnreachable(KubeError):
    """The API server did not answer."""

    def __init__(self, server: str, reason: str) -> None:
        super().__init__(server, reason)
        self.server = server
        self.reason = reason

    def __str__(self) -> str:
        return f"API server {self.server}: {self.reason}"


class BadAnswer(ApiUnreachable):
    """An answer does not come from an API server, or an intermediate proxy has damaged it."""


class ApiRefused(KubeError):
    """The API server answered with an error status.

    Attributes:
        request: method and path, such as ``GET /api/v1/pods``.
        status: the status of HTTP, or of the Status object in a watch.
        reason: the API's CamelCase word, such as ``Forbidden``. Can be empty.
        message: the API server's sentence.
    """

    def __init__(self, request: str, status: int, reason: str, message: str) -> None:
        super().__init__(request, status, reason, message)
        self.request = request
        self.status = status
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        said = " ".join(self.message.split()) or self.reason or f"status {self.status}"
        hint = {
            401: "; the token or certificate is expired or of another cluster",
            403: "; its role lacks this (RBAC)",
        }.get(self.status, "")
        return f"{self.request}: {said}{hint}"


class WatchFailed(ApiRefused):
    """The API server ended a watch with an error event."""
