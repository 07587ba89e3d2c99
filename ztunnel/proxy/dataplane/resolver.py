"""Resolves host names to addresses with their time to live, for STRICT_DNS and LOGICAL_DNS clusters.

The DNS library takes 2 MiB, and configurations of ambient meshes have no such clusters. So it is imported only
when the first name is resolved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from xds.model.address import canonical
from xds.model.dns import HOSTS_RESOLVER, DnsResolver
from ztunnel.runtime.settings import plain_reason
from ztunnel.runtime.watched_file import FileState, file_state

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver as AsyncResolver
    from dns.name import Name
    from dns.rdatatype import RdataType
    from dns.resolver import Answer as DnsAnswer


#: The time to live of names from a hosts file, in seconds. The file itself contains no time to live.
_HOSTS_TTL_S: Final = 5.0
#: The time to live, in seconds, if the answers' own are not used. Envoy assumes this value for getaddrinfo(3).
_NO_TTL_S: Final = 60.0
#: The query timeout and number of tries. Each is used if only the other setting is configured. They are the
#: defaults in Envoy's documentation of ``CaresDnsResolverConfig``.
_QUERY_TIMEOUT_S: Final = 5.0
_TRIES: Final = 4


@dataclass(frozen=True, slots=True)
class Answer:
    """The resolved addresses in the order of the answer, and their time to live in seconds."""

    addresses: tuple[str, ...]
    ttl_s: float


class ResolveFailed(Exception):
    """A name could not be resolved.

    Attributes:
        absent: whether the servers answered that the name does not exist or has no address. After other failures,
            the caller can keep earlier results.
    """

    def __init__(self, reason: str, *, absent: bool = False) -> None:
        super().__init__(reason)
        self.absent = absent


class Resolver:
    """Resolves names like other programs of the host: by ``/etc/hosts``, then by the name servers and the search
    list of ``/etc/resolv.conf``.

    As in glibc, the look-up continues with the next search domain if a query fails, is refused or gets no answer.

    Args:
        hosts: the file with the addresses of names, read again whenever it changes.
        resolv_conf: the file with the name servers, read once.
        port: the port of the name servers in ``resolv_conf``.
        lifetime_s: the default time limit per search-list candidate and address family.
        settings: differences from the host's resolver configuration.
    """

    def __init__(
        self,
        hosts: Path = Path("/etc/hosts"),
        resolv_conf: Path = Path("/etc/resolv.conf"),
        *,
        port: int = 53,
        lifetime_s: float = 5.0,
        settings: DnsResolver = HOSTS_RESOLVER,
    ) -> None:
        self._settings = settings
        self._loaded: AsyncResolver | None = None
        self._hosts = hosts
        self._hosts_state: FileState = None
        self._fixed: dict[str, tuple[str, ...]] = {}
        self._resolv_conf = resolv_conf
        self._port = port
        self._lifetime_s = lifetime_s

    def with_settings(self, settings: DnsResolver) -> Resolver:
        """Return a resolver that uses the same files, but other settings."""
        return Resolver(
            self._hosts, self._resolv_conf, port=self._port, lifetime_s=self._lifetime_s, settings=settings
        )

    async def resolve(self, name: str, family: str) -> Answer:
        """Look up ``name``.

        Args:
            name: a DNS name, or an IP address, which is returned unchanged.
            family: ``V4_ONLY``, ``V6_ONLY``, ``AUTO`` (IPv6, or IPv4 for a name without IPv6), ``V4_PREFERRED`` or
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
        fixed = _of_family(self._named_in_hosts(name), family)
        if fixed:
            return Answer(fixed, _HOSTS_TTL_S)
        import dns.asyncresolver
        import dns.exception
        import dns.rdatatype
        import dns.resolver

        if self._loaded is None:
            self._loaded = self._load()
        orders = {
            "V4_ONLY": (dns.rdatatype.A,),
            "V6_ONLY": (dns.rdatatype.AAAA,),
            "V4_PREFERRED": (dns.rdatatype.A, dns.rdatatype.AAAA),
        }
        found: list[str] = []
        ttls: list[float] = []
        reason, absent = "no address", True
        for kind in orders.get(family, (dns.rdatatype.AAAA, dns.rdatatype.A)):
            try:
                answer = await self._first(name, kind)
            except (dns.exception.DNSException, OSError) as error:
                reason = plain_reason(error)
                absent &= isinstance(error, dns.resolver.NXDOMAIN | dns.resolver.NoAnswer)
                continue
            found.extend(canonical(record.address) for record in answer)
            ttls.append(float(answer.rrset.ttl) if answer.rrset is not None else 0.0)
            if family != "ALL":
                break
        if not found:
            raise ResolveFailed(f"cannot resolve {name}: {reason}", absent=absent)
        return Answer(tuple(found), min(ttls) if self._settings.has_ttls else _NO_TTL_S)

    def _load(self) -> AsyncResolver:
        import dns.asyncresolver
        import dns.nameserver
        import dns.resolver

        settings = self._settings
        servers = [dns.nameserver.Do53Nameserver(each.host, each.port) for each in settings.servers]
        loaded = dns.asyncresolver.Resolver(configure=False)
        try:
            loaded.read_resolv_conf(str(self._resolv_conf))
        except dns.resolver.NoResolverConfiguration:
            if not servers:
                raise ResolveFailed(f"{self._resolv_conf} has no name server") from None
        loaded.port = self._port
        if servers and not (settings.servers_are_fallback and loaded.nameservers):
            loaded.nameservers = list(servers)
        loaded.lifetime = self._lifetime_s
        if settings.query_timeout_s is not None or settings.tries is not None:
            loaded.timeout = settings.query_timeout_s or _QUERY_TIMEOUT_S
            loaded.lifetime = loaded.timeout * (settings.tries or _TRIES)
        loaded.rotate = settings.rotate
        return loaded

    async def _first(self, name: str, kind: RdataType) -> DnsAnswer:
        """Return the answer for the first search-list candidate that the servers can resolve.

        Raises:
            dns.exception.DNSException, OSError: no server has an answer. The first failure other than NXDOMAIN is
                raised, because that name can exist.
        """
        import dns.exception
        import dns.name
        import dns.resolver

        loaded = self._loaded
        assert loaded is not None
        asked = dns.name.from_text(name, None)
        candidates = [asked]
        if not asked.is_absolute():
            search = loaded.search if self._settings.search else ()
            candidates = _candidates(asked, search, loaded.ndots or 1)
        failure: dns.exception.DNSException | OSError | None = None
        missing: dns.exception.DNSException | None = None
        for candidate in candidates:
            try:
                return await loaded.resolve(candidate, kind, tcp=self._settings.tcp, search=False)
            except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer) as error:
                missing = missing or error
            except (dns.exception.DNSException, OSError) as error:
                failure = failure or error
        first = failure or missing
        assert first is not None  # there is at least one candidate
        raise first

    def _named_in_hosts(self, name: str) -> tuple[str, ...]:
        """Return the addresses of a name in the hosts file, in the file's order."""
        state = file_state(self._hosts)
        if state != self._hosts_state:
            self._hosts_state = state
            try:
                self._fixed = addresses_in(self._hosts.read_text(errors="replace"))
            except OSError:
                self._fixed = {}
        return self._fixed.get(name.rstrip(".").lower(), ())


def addresses_in(hosts: str) -> dict[str, tuple[str, ...]]:
    """Return the addresses of each name in a hosts file (hosts(5)), with names in lower case. Bad lines are
    skipped.
    """
    found: dict[str, list[str]] = {}
    for line in hosts.splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        try:
            host = canonical(address)
        except ValueError:
            continue
        for name in names:
            found.setdefault(name.lower(), []).append(host)
    return {name: tuple(dict.fromkeys(of_name)) for name, of_name in found.items()}


def _of_family(hosts: tuple[str, ...], family: str) -> tuple[str, ...]:
    """Return the addresses selected by ``family``; see :meth:`Resolver.resolve`."""
    v4, v6 = (tuple(host for host in hosts if (":" in host) is wanted) for wanted in (False, True))
    return {"V4_ONLY": v4, "V6_ONLY": v6, "V4_PREFERRED": v4 or v6, "ALL": v6 + v4}.get(family, v6 or v4)


def _candidates(name: Name, search: Iterable[Name], ndots: int) -> list[Name]:
    """Return the names to query, in glibc's order. A name with at least ``ndots`` dots comes before its
    expansions.
    """
    import dns.name

    plain = name.concatenate(dns.name.root)
    expanded = []
    for suffix in search:
        with contextlib.suppress(dns.name.NameTooLong):
            expanded.append(name.concatenate(suffix))
    return [plain, *expanded] if len(name) > ndots else [*expanded, plain]
