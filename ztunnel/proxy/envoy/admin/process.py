"""Reports the proxy's memory use, version and certificate expiry, and registers the ``server.*`` gauges."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from OpenSSL import SSL

import hbone
from ztunnel import __version__
from ztunnel.proxy.envoy.admin.inspected import InspectedProxy

DISTRIBUTION = "ztunnel-py"
_STATUS = Path("/proc/self/status")


def version() -> str:
    """Return the version in Envoy's form ``<commit>/<version>/<tree>/<build>/<TLS library>``, with the package's
    name as the commit.

    The build is ``RELEASE-pure`` or ``RELEASE-compiled``, by the build of the tunnel engine.
    """
    library = SSL.SSLeay_version(SSL.SSLEAY_VERSION).decode()  # the library that tunnels use
    return f"{DISTRIBUTION}/{__version__}/Clean/RELEASE-{hbone.build()}/{library.replace(' ', '-')}"


def memory() -> dict[str, int]:
    """Return the fields of ``/memory``, in bytes. Fields without an equivalent in CPython are 0.

    ``allocated`` is anonymous resident memory, ``heap_size`` the data segment, ``total_physical_bytes`` all
    resident memory.
    """
    found: dict[str, int] = {}
    for line in _STATUS.read_text().splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith(" kB"):
            found[name] = int(rest.split()[0]) * 1024
    return {
        "allocated": found.get("RssAnon", 0),
        "heap_size": found.get("VmData", 0),
        "pageheap_unmapped": 0,
        "pageheap_free": 0,
        "total_thread_cache": 0,
        "total_physical_bytes": found.get("VmRSS", 0),
    }


def days_until_first_expiry(proxy: InspectedProxy) -> int:
    """Return the number of whole days until the first certificate in use expires. It is 0 if one has expired, and
    the largest possible value without certificates.
    """
    from ztunnel.proxy.envoy.admin.certs import certificates_in_use

    now = datetime.fromtimestamp(proxy.clock.wall(), UTC)
    own, roots = certificates_in_use(proxy)
    days = [(certificate.not_valid_after_utc - now).days for certificate in (*own, *roots)]
    return max(0, min(days, default=2**32 - 1))


def register(proxy: InspectedProxy) -> None:
    """Register the ``server.`` gauges whose values come from the operating system or from the proxy as a whole."""
    scope = proxy.stats.scope("server")
    scope.gauge("memory_allocated", lambda: float(memory()["allocated"]))
    scope.gauge("memory_heap_size", lambda: float(memory()["heap_size"]))
    scope.gauge("memory_physical_size", lambda: float(memory()["total_physical_bytes"]))
    scope.gauge("days_until_first_cert_expiring", lambda: float(days_until_first_expiry(proxy)))
    # ``server.version``: Envoy shows the first digits of its commit hash. We show the version, two digits per
    # part.
    parts = [int(part) if part.isdigit() else 0 for part in __version__.split(".")[:3]]
    scope.gauge("version", lambda: float(parts[0] * 10_000 + parts[1] * 100 + parts[2]))
