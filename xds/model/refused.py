"""Addresses whose workload or service could not be read."""

from dataclasses import dataclass

from xds.model.service import CidrAddress
from xds.model.workload import NetworkAddress


@dataclass(frozen=True, slots=True)
class RefusedResource:
    """A workload or service that was refused, with the addresses that could be read.

    It is unknown whether connections to these addresses must be encrypted, so they must fail.

    Attributes:
        name: the name of the xDS resource: a workload's uid, or ``namespace/hostname``.
        reason: why the resource was refused.
        addresses: single addresses. ``blocks`` are blocks of addresses.
    """

    name: str
    reason: str
    addresses: tuple[NetworkAddress, ...] = ()
    blocks: tuple[CidrAddress, ...] = ()
