"""The errors between the agent, pods and proxies.

::

    AgentError
    ├── EnrolFailed         the namespace or the rules of a pod failed; none of our rules is left in it
    │   └── TwoAgents       an earlier agent's rules are in the way; the pod keeps using these rules
    ├── NotFound            no process of the pod shows where its network namespace is
    ├── CannotAdd           a sandbox is not in the mesh in time; its runtime creates a new one
    ├── NoProxy             no proxy is connected; the next one gets the pod in its snapshot
    ├── ProxyGone           the connection ended before the answer
    ├── ProxySilent         the proxy did not answer in time
    └── ProxyRefused        the proxy answered with an error
"""


class AgentError(Exception):
    """Base class of the errors that the agent raises."""


class EnrolFailed(AgentError):
    """A pod could not be prepared, and was not announced to proxies."""

    def __init__(self, pod: str, reason: str) -> None:
        super().__init__(pod, reason)
        self.pod = pod
        self.reason = reason

    def __str__(self) -> str:
        return f"pod {self.pod}: {self.reason}"


class TwoAgents(EnrolFailed):
    """Rules of another agent prevent ours. The pod keeps those rules, and its proxy keeps the pod."""

    def __str__(self) -> str:
        return f"{super().__str__()}; the pod keeps the rules of its earlier agent and works; restart it"


class NotFound(AgentError):
    """The network namespace of a pod was not found."""

    def __init__(self, pod: str, addresses: str) -> None:
        super().__init__(pod, addresses)
        self.pod = pod
        self.addresses = addresses

    def __str__(self) -> str:
        return f"pod {self.pod}: no process of it is in a network namespace with {self.addresses}"


class CannotAdd(AgentError):
    """A pod that belongs to the mesh could not be enrolled, so it must not start."""


class NoProxy(AgentError):
    """No proxy is connected."""

    def __str__(self) -> str:
        return "no ztunnel connection"


class ProxyGone(AgentError):
    """The connection to the proxy ended before its answer."""

    def __str__(self) -> str:
        return "the ztunnel is gone"


class ProxySilent(AgentError):
    """The proxy did not answer within the limit; the connection stays open."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return f"no answer from the ztunnel in {self.timeout_s:g} s"


class ProxyRefused(AgentError):
    """The proxy answered with an error; ``reason`` is its text."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the ztunnel refused: {self.reason}"
