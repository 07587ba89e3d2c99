"""Names to addresses with their time to live, for STRICT_DNS and LOGICAL_DNS clusters.

The library is loaded when a name is resolved for the first time: ambient configurations have none, and it
takes 2 MiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from xds.model.address import canonical

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver as AsyncResolver


@dataclass(frozen=True, slots=True)
class Answer:
    """Addresses in the order of the answer, and how many seconds they hold."""

    addresses: tuple[str, ...]
    ttl_s: float


class ResolveFailed(Exception):
    """A name could not be resolved; what is known of it is kept."""


class Resolver:
    """Asks the name servers of ``/etc/resolv.conf``, search list included, as the rest of the host does."""

    def __init__(self) -> None:
        self._loaded: AsyncResolver | None = None

    async def resolve(self, name: str, family: str) -> Answer:
        """Look up ``name``.

        Args:
            name: a DNS name, or an IP address, which is its own answer.
            family: ``V4_ONLY``, ``V6_ONLY``, ``AUTO`` (IPv6 first, IPv4 if there is none), ``V4_PREFERRED`` or
                ``ALL``.

        Raises:
            ResolveFailed: no such name, no address of the family, or no server answered.
        """
        try:
            return Answer((canonical(name),), 60.0)
        except ValueError:
            pass
        if name.rstrip(".").lower() == "localhost":
            loopback = {"V6_ONLY": ("::1",), "ALL": ("127.0.0.1", "::1")}.get(family, ("127.0.0.1",))
            return Answer(loopback, 60.0)
        import dns.asyncresolver
        import dns.exception
        import dns.rdatatype

        if self._loaded is None:
            self._loaded = dns.asyncresolver.Resolver()
        orders = {
            "V4_ONLY": (dns.rdatatype.A,),
            "V6_ONLY": (dns.rdatatype.AAAA,),
            "V4_PREFERRED": (dns.rdatatype.A, dns.rdatatype.AAAA),
        }
        found: list[str] = []
        ttls: list[float] = []
        reason = "no address"
        for kind in orders.get(family, (dns.rdatatype.AAAA, dns.rdatatype.A)):
            try:
                answer = await self._loaded.resolve(name, kind, search=True)
            except (dns.exception.DNSException, OSError) as error:
                reason = str(error)
                continue
            found.extend(canonical(record.address) for record in answer)
            ttls.append(float(answer.rrset.ttl) if answer.rrset is not None else 0.0)
            if family != "ALL":
                break
        if not found:
            raise ResolveFailed(f"cannot resolve {name}: {reason}")
        return Answer(tuple(found), min(ttls))
