"""Limits the rate at which each identity can open connections to the pods of this node, by a token bucket per
identity.

    ztunnel proxy --addon rate_limit.py --addon-option rate-limit.per_second=50

Each process counts separately, so with several workers, each worker admits this rate.
"""

import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from ztunnel.addons import Addon, Deny, Facts, Metric

_MOST_IDENTITIES = 10_000


class RateLimit(Addon):
    """Denies inbound connections of an identity that exceeds its rate."""

    name = "rate-limit"
    pure = False  # the verdict depends on earlier connections

    @dataclass(frozen=True)
    class Options:
        """The limit of each identity: ``burst`` connections at once, then ``per_second``. It applies to pods in
        the given namespaces, or in all.
        """

        per_second: float = 100.0
        burst: int = 200
        namespaces: tuple[str, ...] = ()

        def __post_init__(self) -> None:
            if self.per_second <= 0 or self.burst < 1:
                raise ValueError("per_second must be above 0 and burst at least 1")

    def configured(self, options: Options) -> None:
        self.options = options
        self.now_s = time.monotonic
        self.denied: dict[tuple[str, ...], float] = {}
        # For each identity, its tokens and the time when they were counted. The least recently seen identity is
        # forgotten first.
        self.buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def accepting(self, facts: Facts) -> Deny | None:
        options = self.options
        if options.namespaces and facts.destination.namespace not in options.namespaces:
            return None
        key = facts.source_identity or facts.source_address
        now_s = self.now_s()
        tokens, counted_s = self.buckets.get(key, (float(options.burst), now_s))
        tokens = min(options.burst, tokens + (now_s - counted_s) * options.per_second)
        admitted = tokens >= 1
        self.buckets[key] = (tokens - admitted, now_s)
        self.buckets.move_to_end(key)
        if len(self.buckets) > _MOST_IDENTITIES:
            self.buckets.popitem(last=False)
        if admitted:
            return None
        namespace = (facts.source.namespace,)
        self.denied[namespace] = self.denied.get(namespace, 0) + 1
        return Deny(f"more than {options.per_second:g} connections per second of {key}")

    def metrics(self) -> Iterator[Metric]:
        yield Metric("denied", "Connections above the rate of their identity", self.denied, ("source_namespace",))
