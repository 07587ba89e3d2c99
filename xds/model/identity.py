"""SPIFFE identities of workloads."""

import re
from typing import NamedTuple

_PREFIX = "spiffe://"
#: A segment of a SPIFFE id. It permits upper case in trust domains: Istio's configuration does, although SPIFFE
#: does not.
_SEGMENT = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]+")


class SpiffeId(NamedTuple):
    """``spiffe://<trust domain>/ns/<namespace>/sa/<service account>``, in Istio's form.

    It is a tuple, because tuples are hashed and compared without Python code, and identities are keys of look-ups
    for every connection.
    """

    trust_domain: str
    namespace: str
    service_account: str

    @classmethod
    def parse(cls, text: str) -> "SpiffeId":
        """Parse a SPIFFE id in Istio's form.

        Raises:
            ValueError: the name has not exactly five segments, or a segment is empty or has characters that SPIFFE
                ids exclude (SPIFFE-ID, 2.1 and 2.2). Another parser could misread a query, a port, an escape or a
                NUL in the name.
        """
        parts = text.removeprefix(_PREFIX).split("/") if text.startswith(_PREFIX) else []
        if len(parts) != 5 or parts[1] != "ns" or parts[3] != "sa" or not all(map(_SEGMENT.fullmatch, parts)):
            raise ValueError(f"not a workload identity (spiffe://<td>/ns/<ns>/sa/<sa>): {text!r}")
        return cls(parts[0], parts[2], parts[4])

    def __str__(self) -> str:
        return f"{_PREFIX}{self.trust_domain}/ns/{self.namespace}/sa/{self.service_account}"
