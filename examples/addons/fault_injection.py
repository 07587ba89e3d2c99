"""Injects faults into a share of the connections to pods with certain labels: delays, refusals, and broken
connections.

    ztunnel proxy --addon fault_injection.py \\
        --addon-option fault-injection.labels=app=reviews --addon-option fault-injection.share=0.1 \\
        --addon-option fault-injection.cut_after_bytes=65536
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from ztunnel.addons import Addon, Cut, Delay, Deny, Facts, Verdict


class FaultInjection(Addon):
    """Injects one of the configured faults, chosen at random, into a share of outbound connections."""

    name = "fault-injection"
    pure = False  # lots are drawn
    on_error = "ignore"  # a broken experiment must not stop the mesh

    @dataclass(frozen=True)
    class Options:
        """The destination's labels, the share of connections, and the faults. A fault with the value 0 is
        disabled.
        """

        labels: Mapping[str, str]
        share: float = 0.1
        delay_s: float = 0.0
        refuse: bool = False
        cut_after_s: float = 0.0
        cut_after_bytes: int = 0
        seed: int | None = None

        def __post_init__(self) -> None:
            if not 0 <= self.share <= 1:
                raise ValueError("share must be between 0 and 1")
            if not (self.delay_s or self.refuse or self.cut_after_s or self.cut_after_bytes):
                raise ValueError("no fault: set delay_s, refuse, cut_after_s or cut_after_bytes")

    def configured(self, options: Options) -> None:
        self.labels = options.labels.items()
        self.share = options.share
        self.draw = random.Random(options.seed)
        self.faults: list[Verdict] = []
        if options.delay_s:
            self.faults.append(Delay(options.delay_s))
        if options.refuse:
            self.faults.append(Deny("injected fault"))
        if options.cut_after_s:
            self.faults.append(Cut("injected fault", after_s=options.cut_after_s))
        if options.cut_after_bytes:
            self.faults.append(Cut("injected fault", after_bytes=options.cut_after_bytes))

    def connecting(self, facts: Facts) -> Verdict | None:
        if not self.labels <= facts.destination.labels.items() or self.draw.random() >= self.share:
            return None
        return self.draw.choice(self.faults)
