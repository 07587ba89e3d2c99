"""Sends a share of the connections to a service to the endpoints of one version.

    ztunnel proxy --addon canary.py \
        --addon-option canary.service=reviews.default.svc.cluster.local --addon-option canary.share=0.05

If no endpoint has that version, the connection uses any other. Services with a waypoint are not changed.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ztunnel.addons import Addon, Facts, Metric, Prefer, Verdict


class Canary(Addon):
    """For a share of a service's connections, prefers endpoints with certain labels."""

    name = "canary"
    pure = False  # lots are drawn
    on_error = "ignore"  # without a canary every connection goes to any version

    @dataclass(frozen=True)
    class Options:
        """The service's host name, the share of its connections, and the labels of the preferred endpoints."""

        service: str
        share: float = 0.05
        labels: Mapping[str, str] = field(default_factory=lambda: {"version": "v2"})
        seed: int | None = None

        def __post_init__(self) -> None:
            if not 0 <= self.share <= 1:
                raise ValueError("share must be between 0 and 1")

    def configured(self, options: Options) -> None:
        self.options = options
        self.prefer = Prefer(options.labels)
        self.draw = random.Random(options.seed)
        self.chosen = 0

    def connecting(self, facts: Facts) -> Verdict | None:
        options = self.options
        if facts.service != options.service or self.draw.random() >= options.share:
            return None
        self.chosen += 1
        return self.prefer

    def metrics(self) -> Iterator[Metric]:
        yield Metric(
            "chosen", "Connections that prefer the canary", {(self.options.service,): self.chosen}, ("service",)
        )
