"""SPIFFE identities of workloads."""

from dataclasses import dataclass

_PREFIX = "spiffe://"


@dataclass(frozen=True, slots=True)
class SpiffeId:
    """``spiffe://<trust domain>/ns/<namespace>/sa/<service account>``, as Istio shapes it."""

    trust_domain: str
    namespace: str
    service_account: str

    @classmethod
    def parse(cls, text: str) -> "SpiffeId":
        """Read an identity.

        Raises:
            ValueError: not exactly the five segments, or one of them is empty, or there are control characters or
                others beyond ASCII: a NUL or a line's end is there to deceive the next reader of the name.
        """
        parts = text.removeprefix(_PREFIX).split("/") if text.startswith(_PREFIX) else []
        if len(parts) != 5 or parts[1] != "ns" or parts[3] != "sa" or not all(parts) or not _is_plain(text):
            raise ValueError(f"not a workload identity (spiffe://<td>/ns/<ns>/sa/<sa>): {text!r}")
        return cls(parts[0], parts[2], parts[4])

    def __str__(self) -> str:
        return f"{_PREFIX}{self.trust_domain}/ns/{self.namespace}/sa/{self.service_account}"


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable()
