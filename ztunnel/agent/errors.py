"""What goes wrong between the agent, pods and proxies.

::

    AgentError
    ├── EnrolFailed         a pod's namespace or rules; nothing of ours is left in it
    ├── NoProxy             no proxy is connected; the next one is told in its snapshot
    ├── ProxyGone           the proxy went away before it answered
    ├── ProxySilent         it did not answer in time
    └── ProxyRefused        it answered with an error
"""


class AgentError(Exception):
    """Root of what the agent raises."""


class EnrolFailed(AgentError):
    """A pod could not be prepared, and was not announced."""

    def __init__(self, pod: str, reason: str) -> None:
        super().__init__(pod, reason)
        self.pod = pod
        self.reason = reason

    def __str__(self) -> str:
        return f"pod {self.pod}: {self.reason}"


class NoProxy(AgentError):
    """Nobody to tell."""

    def __str__(self) -> str:
        return "no ztunnel connection"


class ProxyGone(AgentError):
    """The connection ended."""

    def __str__(self) -> str:
        return "the ztunnel is gone"


class ProxySilent(AgentError):
    """No answer within the limit; the connection stays."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return f"no answer from the ztunnel in {self.timeout_s:g} s"


class ProxyRefused(AgentError):
    """The proxy's own words."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the ztunnel refused: {self.reason}"
