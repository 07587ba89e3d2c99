"""Rebuilds admin pages of Envoy's dialect from a saved ``config_dump``, as far as it has their content.

They replace a running proxy's pages as the input of tables (:mod:`ztunnel.ask.inspect.envoy_tables`).
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from cryptography import x509

from hbone.x509_errors import UNREADABLE
from xds.errors import ConfigError
from ztunnel.ask.inspect.envoy_listeners import read_configuration
from ztunnel.proxy.envoy.admin.certs import details
from ztunnel.proxy.envoy.admin.decisions import policies
from ztunnel.runtime.clock import Clock

#: Where a dump contains certificates, and which list of ``/certs`` shows them: a chain's leaf, and all roots.
_HELD: Final = {"certificate_chain": "cert_chain", "trusted_ca": "ca_cert"}

_NO_STATUS: Final = "state, uptime, what is not ready, health of endpoints, connections, denials"


class _Elsewhere(Exception):
    """The dump has no certificates, only the name of a file or variable on the proxy's node that contains them."""


class SavedPages(NamedTuple):
    """The pages that a table needs, and the parts missing from the dump.

    Attributes:
        pages: the pages by path.
        lacks: a line for each part that the dump does not have.
    """

    pages: Mapping[str, Any]
    lacks: tuple[str, ...]


def policy_pages(dump: Mapping[str, Any], clock: Clock) -> SavedPages:
    """Return the pages for the table of policies. They have no counts, because only a running proxy has these.

    Raises:
        ConfigError: it is no dump of Envoy's dialect.
    """
    configuration, lacks = read_configuration(dump, clock)
    unread = [each for each in lacks if each.startswith("listener ")]
    lines = ("what each policy decided", *unread)
    return SavedPages({"/rbac": {"policies": policies(configuration.listeners)}}, lines)


def certificate_pages(dump: Mapping[str, Any], clock: Clock) -> SavedPages:
    """Return the pages for the table of certificates.

    Raises:
        ConfigError: it is no dump of Envoy's dialect.
    """
    now = datetime.fromtimestamp(clock.wall(), UTC)
    lacks: dict[str, None] = {}
    shown: list[dict[str, object]] = []
    for kind, source in _certificates(_sections(dump)):
        try:
            held = x509.load_pem_x509_certificates(_pem(source))
        except _Elsewhere as elsewhere:
            lacks[f"the certificates of {elsewhere}"] = None
            continue
        except UNREADABLE as error:
            lacks[f"certificates that can be read: {error}"] = None
            continue
        shown.append({kind: details(held[:1] if kind == "cert_chain" else held, now)})
    return SavedPages({"/certs": {"certificates": shown}}, tuple(lacks))


def _sections(dump: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    sections = dump.get("configs")
    if not isinstance(sections, list) or not all(isinstance(each, Mapping) for each in sections):
        raise ConfigError("configs: must be a list of mappings")
    return sections


def _certificates(value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Find all certificates of a dump: in secrets, and inline in the contexts of listeners and clusters."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key in _HELD and isinstance(inner, Mapping):
                yield _HELD[key], inner
            else:
                yield from _certificates(inner)
    elif isinstance(value, list):
        for each in value:
            yield from _certificates(each)


def _pem(source: Mapping[str, Any]) -> bytes:
    """Return the PEM of a data source.

    Raises:
        _Elsewhere: the dump contains only its location.
        ValueError: it is not base64.
    """
    text = source.get("inline_string")
    if text:
        return str(text).encode()
    if source.get("inline_bytes"):
        return b64decode(str(source["inline_bytes"]))
    where = source.get("filename") or source.get("environment_variable")
    raise _Elsewhere(where or "a source without a name")


def status_pages(dump: Mapping[str, Any], clock: Clock) -> SavedPages:
    """Return the pages for the table of the status.

    Raises:
        ConfigError: it is no dump of Envoy's dialect.
    """
    found = certificate_pages(dump, clock)
    node: Mapping[str, Any] = {}
    clusters = 0
    for section in _sections(dump):
        kind = str(section.get("@type")).rpartition(".")[2]
        if kind == "BootstrapConfigDump":
            node = (section.get("bootstrap") or {}).get("node") or {}
        elif kind == "ClustersConfigDump":
            clusters += sum(
                len(section.get(name) or []) for name in ("static_clusters", "dynamic_active_clusters")
            )
    pages = {
        "/server_info": {"node": node, "version": node.get("user_agent_name")},
        "/clusters": {"cluster_statuses": [{}] * clusters},
        "/init_dump": {},
        "/connections": None,
        "/denials": None,
    }
    return SavedPages({**found.pages, **pages}, (_NO_STATUS, *found.lacks))


#: For each table, the function that rebuilds its pages. No dump contains the pages of other tables.
SAVED_PAGES: Final = {"policies": policy_pages, "certificates": certificate_pages, "status": status_pages}
