"""Keeps keys and tokens out of archives, and on request names and addresses. Pure.

Objects are reduced to fields that hold no secrets: containers lose their environment, commands and arguments,
where people put passwords. In any text, such as logs, private keys and tokens are recognised by their format and
removed.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

from ztunnel.ask.check.rules.model import Object

REMOVED: Final = "(removed)"
_KEY: Final = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
#: The rest of a private key at the start of a log, if its beginning was cut off.
_REST_OF_KEY: Final = re.compile(r"\A[\w+/=\s\\-]{,20000}?-----END [A-Z ]*PRIVATE KEY-----")
_TOKEN: Final = re.compile(r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*")
_BEARER: Final = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/-]{16,}=*")
_QUOTED: Final = r'"(?:[^"\\]|\\.)*"'
#: A string of JSON in a string of JSON, such as a message in a line of a log.
_QUOTED_AGAIN: Final = r'\\"(?:[^"\\]|\\\\(?:\\"|.))*\\"'
#: The headers for requests to the control plane and the CA in a proxy's configuration: as JSON, and as JSON in a
#: log line of JSON. Each entry has patterns of all headers and of one, and the replacement of the latter.
_HEADERS: Final = tuple(
    (re.compile(rf"((?:ca|xds)Headers{quote}:\s*\[)((?:\s*\[\s*{text},\s*{text}\s*\],?)+)"),
     re.compile(rf"(\[\s*{text},\s*){text}"), rf"\g<1>{quote}{REMOVED}{quote}")
    for quote, text in (('"', _QUOTED), (r'\\"', _QUOTED_AGAIN))
)  # fmt: skip
_HEADERS_YAML: Final = re.compile(r"((?:ca|xds)Headers:\n)((?:- - .*\n  - .*\n?)+)")
_SECRET_KEYS: Final = frozenset(("env", "envFrom", "command", "args", "data", "stringData", "token", "password"))
_SECRET_ANNOTATIONS: Final = ("kubectl.kubernetes.io/last-applied-configuration",)

_IPV4: Final = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")
_IPV6: Final = re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?![\w:])")
_WORD: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?")
#: Names that are not replaced, because they do not identify their owner, or because checks need them.
_COMMON: Final = frozenset(
    [
        "default",
        "istio-system",
        "kube-system",
        "kube-public",
        "ztunnel",
        "ztunnel-agent",
        "istiod",
        "istio-cni-node",
        "Pod",
        "Node",
        "Service",
        "spiffe",
        "cluster",
        "local",
        "svc",
        "ns",
        "sa",
        "cluster.local",
        "HBONE",
        "TCP",
        "Up",
        "Healthy",
        "app",
        "name",
    ]
)
_LABEL: Final = "[a-z0-9-]{1,63}"
_NAME: Final = "[a-z0-9][a-z0-9.-]{0,252}"
#: Numbers and addresses: their pseudonyms would make times and counts unreadable.
_NUMBER: Final = re.compile(r"[\d.]+")
#: Patterns of the names in pages and logs.
_NAMES: Final = tuple(
    map(
        re.compile,
        (
            rf"spiffe://[^/\s\"]+/ns/({_LABEL})/sa/({_NAME})",
            rf"(?<![a-z0-9-])({_LABEL})\.({_LABEL})\.svc(?![a-z0-9-])",
            rf"~([a-z][a-z0-9.-]*)\.({_LABEL})(?=~)",
            rf"\"(?:pod_name|namespace)\":\s*\"({_NAME})\"",
            rf"\"node_name\":\s*\"(?:[^\"/]*/)?({_NAME})\"",
            rf"\"workloads\":\s*\[\s*{{\s*\"name\":\s*\"({_NAME})\"",
            rf"\b(?:src|dst)\.(?:workload|namespace)\"?[=:]\s*\"?({_NAME})",
        ),
    )
)
_PEM_KEYS: Final = frozenset(("pem", "caBundle"))
#: The form of the keys that belong to a document's format. If a key is the name of an object, it has a slash, a
#: dot or a hyphen.
_FORMAT_KEY: Final = re.compile(r"[A-Za-z_]\w*")


def scrub(text: str) -> str:
    """Return a text without private keys and tokens, and without the values of headers in a configuration."""
    for headers, header, kept in _HEADERS:
        text = headers.sub(partial(_without_values, header, kept), text)
    text = _HEADERS_YAML.sub(lambda found: found[1] + re.sub(r"(?m)^  - .*", f"  - {REMOVED}", found[2]), text)
    text = _REST_OF_KEY.sub(REMOVED, _KEY.sub(REMOVED, text))
    text = _TOKEN.sub(REMOVED, text)
    return _BEARER.sub(lambda found: f"{found[1]} {REMOVED}", text)


def _without_values(header: re.Pattern[str], kept: str, found: re.Match[str]) -> str:
    return found[1] + header.sub(kept, found[2])


def reduced(item: Any) -> Any:
    """Return an object of the API server without the fields that can contain secrets."""
    if isinstance(item, Mapping):
        found = {key: reduced(value) for key, value in item.items() if key not in _SECRET_KEYS}
        for key in _SECRET_ANNOTATIONS:
            found.pop(key, None)
        found.pop("managedFields", None)
        return found
    if isinstance(item, list):
        return [reduced(each) for each in item]
    return scrub(item) if isinstance(item, str) else item


class Redaction:
    """Replaces names and addresses by pseudonyms that are stable within one archive and meaningless outside it.

    Args:
        key: the secret key for deriving this archive's pseudonyms.
        names: the names of namespaces, workloads, services, accounts and nodes.
    """

    def __init__(self, key: bytes, names: Iterable[str]) -> None:
        self._key = key
        self._names: set[str] = set()
        self.learn(names)

    def learn(self, names: Iterable[str]) -> None:
        """Add names to be replaced from now on."""
        parts = {part for name in names for part in (name, *name.split("."))}
        self._names |= {
            name for name in parts if name not in _COMMON and len(name) > 1 and not _NUMBER.fullmatch(name)
        }

    def name(self, text: str) -> str:
        """Return the pseudonym of a name, or the name itself if it need not be replaced."""
        return f"n-{self._digest(text)[:8]}" if text in self._names else text

    def text(self, text: str) -> str:
        """Return a text with its names and addresses replaced."""
        text = _IPV4.sub(lambda found: self._ipv4(found[0]), text)
        text = _IPV6.sub(lambda found: self._ipv6(found[0]), text)
        return _WORD.sub(lambda found: self.name(found[0]), text)

    def value(self, value: Any) -> Any:
        """Return a JSON value with replaced names and addresses, and without certificates, which contain names.

        Keys of the document's format stay, also if a service has such a name (``config``, ``version``). Otherwise
        the archive could not be read.
        """
        if isinstance(value, Mapping):
            return {
                (key if _FORMAT_KEY.fullmatch(key) else self.text(key)): REMOVED
                if key in _PEM_KEYS
                else self.value(inner)
                for key, inner in value.items()
            }
        if isinstance(value, list):
            return [self.value(each) for each in value]
        return self.text(value) if isinstance(value, str) else value

    def page(self, text: str) -> str:
        """Return a page with its names and addresses replaced: JSON, lines of JSON, or text."""
        try:
            return json.dumps(self.value(json.loads(text)), indent=1)
        except ValueError:
            return "\n".join(map(self._line, text.split("\n")))

    def _line(self, line: str) -> str:
        if line.startswith("{"):
            try:
                return json.dumps(self.value(json.loads(line)))
            except ValueError:
                pass
        return self.text(line)

    def _digest(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()

    def _ipv4(self, text: str) -> str:
        try:
            address = ipaddress.IPv4Address(text)
        except ValueError:
            return text
        if address.is_loopback or address.is_unspecified or address.is_link_local:
            return text
        digest = bytes.fromhex(self._digest(text))
        return f"10.{digest[0]}.{digest[1]}.{digest[2]}"

    def _ipv6(self, text: str) -> str:
        try:
            address = ipaddress.IPv6Address(text)
        except ValueError:
            return text
        if address.is_loopback or address.is_unspecified:
            return text
        return str(ipaddress.IPv6Address(bytes.fromhex("fd00" + self._digest(text)[:28])))


def names_in(dump: Mapping[str, Any]) -> set[str]:
    """Return the names in a proxy's dump that a redaction must replace."""
    found: set[str] = set()
    for each in (*(dump.get("workloads") or ()), *(dump.get("services") or ()), *(dump.get("policies") or ())):
        for key in ("name", "namespace", "serviceAccount", "node", "workloadName", "canonicalName", "hostname"):
            if each.get(key):
                found.add(str(each[key]))
    for state in (dump.get("workloadState") or {}).values():
        found.update(str(value) for value in (state.get("info") or {}).values() if value)
    return found


def names_in_text(text: str) -> set[str]:
    """Return the names that a redaction must replace in a page or log: of accounts and namespaces in SPIFFE ids,
    of services in host names, and of workloads and nodes in flows, access lines and node ids.
    """
    return {name for form in _NAMES for found in form.finditer(text) for name in found.groups()}


def names_of(objects: Iterable[Object]) -> set[str]:
    """Return the names in API objects that a redaction must replace: of the objects, and of their namespaces,
    nodes and accounts.
    """
    found: set[str] = set()
    for item in objects:
        metadata, spec = item.get("metadata") or {}, item.get("spec") or {}
        for value in (metadata.get("name"), metadata.get("namespace"), spec.get("nodeName"),
                      spec.get("serviceAccountName")):  # fmt: skip
            if value:
                found.add(str(value))
    return found
