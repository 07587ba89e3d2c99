"""Parses substitution format strings (``%DOWNSTREAM_REMOTE_ADDRESS%``). The application renders them.

Syntax: ``%NAME%``, ``%NAME(argument)%``, ``%NAME(argument):length%``; ``%%`` is a percent sign. The header
syntax of 2022, ``%DYNAMIC_METADATA(["tunnel", "destination"])%``, is read as its colon form.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from xds.errors import ConfigError

_COMMAND = re.compile(r"%([A-Z][A-Z0-9_]*)(?:\((.*?)\))?(?::(\d+))?%", re.DOTALL)

#: All commands, and whether a command has an argument: required (``True``), optional (``None``) or never
#: (``False``).
COMMANDS: Mapping[str, bool | None] = {
    "START_TIME": None,
    "BYTES_RECEIVED": False,
    "BYTES_SENT": False,
    "DURATION": False,
    "PROTOCOL": False,
    "RESPONSE_CODE": False,
    "RESPONSE_CODE_DETAILS": None,
    "CONNECTION_TERMINATION_DETAILS": False,
    "RESPONSE_FLAGS": False,
    "RESPONSE_FLAGS_LONG": False,
    "UPSTREAM_HOST": False,
    "UPSTREAM_REMOTE_ADDRESS": False,
    "UPSTREAM_REMOTE_ADDRESS_WITHOUT_PORT": False,
    "UPSTREAM_REMOTE_PORT": False,
    "UPSTREAM_CLUSTER": False,
    "UPSTREAM_LOCAL_ADDRESS": False,
    "UPSTREAM_LOCAL_ADDRESS_WITHOUT_PORT": False,
    "UPSTREAM_LOCAL_PORT": False,
    "UPSTREAM_TRANSPORT_FAILURE_REASON": False,
    "UPSTREAM_PEER_URI_SAN": False,
    "UPSTREAM_REQUEST_ATTEMPT_COUNT": False,
    "DOWNSTREAM_LOCAL_ADDRESS": False,
    "DOWNSTREAM_LOCAL_ADDRESS_WITHOUT_PORT": False,
    "DOWNSTREAM_LOCAL_PORT": False,
    "DOWNSTREAM_REMOTE_ADDRESS": False,
    "DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT": False,
    "DOWNSTREAM_REMOTE_PORT": False,
    "DOWNSTREAM_DIRECT_REMOTE_ADDRESS": False,
    "DOWNSTREAM_DIRECT_REMOTE_ADDRESS_WITHOUT_PORT": False,
    "DOWNSTREAM_DIRECT_REMOTE_PORT": False,
    "DOWNSTREAM_PEER_URI_SAN": False,
    "DOWNSTREAM_PEER_DNS_SAN": False,
    "DOWNSTREAM_LOCAL_URI_SAN": False,
    "DOWNSTREAM_PEER_SUBJECT": False,
    "DOWNSTREAM_TLS_VERSION": False,
    "DOWNSTREAM_TLS_CIPHER": False,
    "DOWNSTREAM_TRANSPORT_FAILURE_REASON": False,
    "REQUESTED_SERVER_NAME": None,
    "ROUTE_NAME": False,
    "VIRTUAL_CLUSTER_NAME": False,
    "FILTER_CHAIN_NAME": False,
    "CONNECTION_ID": False,
    "STREAM_ID": False,
    "HOSTNAME": False,
    "REQ": True,
    "RESP": True,
    "TRAILER": True,
    "DYNAMIC_METADATA": True,
    "UPSTREAM_METADATA": True,
    "CLUSTER_METADATA": True,
    "FILTER_STATE": True,
    "ENVIRONMENT": True,
    "REQUEST_HEADER": True,
    "RESPONSE_HEADER": True,
    "RESPONSE_TRAILER": True,
    "METADATA": True,
    "QUERY_PARAM": True,
    "EMIT_TIME": None,
    "EMIT_TIME_LOCAL": None,
    "START_TIME_LOCAL": None,
    "PATH": None,
    "GRPC_STATUS": None,
    "ACCESS_LOG_TYPE": False,
    "LISTENER_NAME": False,
    "UPSTREAM_CLUSTER_RAW": False,
    "UNIQUE_ID": False,
    "TRACE_ID": False,
    "SPAN_ID": False,
    "TLS_JA3_FINGERPRINT": False,
    "TLS_JA4_FINGERPRINT": False,
    "GRPC_STATUS_NUMBER": False,
    "DOWNSTREAM_PEER_EMAIL_SAN": False,
    "DOWNSTREAM_PEER_IP_SAN": False,
    "DOWNSTREAM_PEER_OTHERNAME_SAN": False,
    "DOWNSTREAM_PEER_ISSUER": False,
    "DOWNSTREAM_PEER_SERIAL": False,
    "DOWNSTREAM_PEER_FINGERPRINT_1": False,
    "DOWNSTREAM_PEER_FINGERPRINT_256": False,
    "DOWNSTREAM_PEER_CHAIN_SERIALS": False,
    "DOWNSTREAM_PEER_CHAIN_FINGERPRINTS_1": False,
    "DOWNSTREAM_PEER_CHAIN_FINGERPRINTS_256": False,
    "DOWNSTREAM_LOCAL_SUBJECT": False,
    "DOWNSTREAM_LOCAL_DNS_SAN": False,
    "DOWNSTREAM_LOCAL_EMAIL_SAN": False,
    "DOWNSTREAM_LOCAL_IP_SAN": False,
    "DOWNSTREAM_LOCAL_OTHERNAME_SAN": False,
    "DOWNSTREAM_PEER_CERT": False,
    "UPSTREAM_PEER_CERT": False,
    "UPSTREAM_PEER_SUBJECT": False,
    "UPSTREAM_PEER_ISSUER": False,
    "UPSTREAM_PEER_DNS_SAN": False,
    "UPSTREAM_PEER_IP_SAN": False,
    "UPSTREAM_LOCAL_URI_SAN": False,
    "UPSTREAM_LOCAL_DNS_SAN": False,
    "UPSTREAM_LOCAL_IP_SAN": False,
    "UPSTREAM_TLS_VERSION": False,
    "UPSTREAM_TLS_CIPHER": False,
    "DOWNSTREAM_PEER_CERT_V_START": None,
    "DOWNSTREAM_PEER_CERT_V_END": None,
    "UPSTREAM_PEER_CERT_V_START": None,
    "UPSTREAM_PEER_CERT_V_END": None,
    "BYTES_RETRANSMITTED": False,
    "PACKETS_RETRANSMITTED": False,
    "RESPONSE_TRAILERS_BYTES": False,
    "ROUNDTRIP_DURATION": False,
    "UPSTREAM_CONNECTION_POOL_READY_DURATION": False,
    "RESPONSE_DURATION": False,
    "CUSTOM_FLAGS": False,
    "LOCAL_REPLY_BODY": False,
    "QUERY_PARAMS": None,
    "DOWNSTREAM_DIRECT_LOCAL_ADDRESS": False,
    "DOWNSTREAM_DIRECT_LOCAL_ADDRESS_WITHOUT_PORT": False,
    "DOWNSTREAM_DIRECT_LOCAL_PORT": False,
    "DOWNSTREAM_LOCAL_ADDRESS_ENDPOINT_ID": False,
    "UPSTREAM_REMOTE_ADDRESS_ENDPOINT_ID": False,
    "UPSTREAM_HOSTS_ATTEMPTED": False,
    "UPSTREAM_HOSTS_ATTEMPTED_WITHOUT_PORT": False,
    "UPSTREAM_HOST_NAME": False,
    "UPSTREAM_HOST_NAME_WITHOUT_PORT": False,
    "UPSTREAM_HOST_NAMES_ATTEMPTED": False,
    "UPSTREAM_HOST_NAMES_ATTEMPTED_WITHOUT_PORT": False,
    "UPSTREAM_PROTOCOL": False,
    "UPSTREAM_SERVER_NAME": False,
}


#: For each kind of metadata that the command METADATA can read, the equivalent command.
METADATA_KINDS: Mapping[str, str] = {
    "DYNAMIC": "DYNAMIC_METADATA",
    "CLUSTER": "CLUSTER_METADATA",
    "UPSTREAM_HOST": "UPSTREAM_METADATA",
    "LISTENER": "LISTENER_METADATA",
    "LISTENER_FILTER_CHAIN": "LISTENER_FILTER_CHAIN_METADATA",
    "ROUTE": "ROUTE_METADATA",
    "VIRTUAL_HOST": "VIRTUAL_HOST_METADATA",
}


#: Commands whose argument is the name of a header, with at most one alternative.
_OF_HEADERS = ("REQ", "RESP", "TRAILER")


@dataclass(frozen=True, slots=True)
class Command:
    """One command in a format string: the name, the argument as written, and the maximum length of its text."""

    name: str
    argument: str = ""
    max_length: int | None = None


@dataclass(frozen=True, slots=True)
class FormatString:
    """A parsed format string: literal texts and commands, in order."""

    parts: tuple[str | Command, ...]

    @property
    def literal(self) -> str | None:
        """The text of the format if it has no commands; otherwise ``None``."""
        return "".join(map(str, self.parts)) if all(isinstance(p, str) for p in self.parts) else None


@lru_cache(maxsize=1024)
def parse_format(text: str) -> FormatString:
    """Parse a format string. Equal texts return the same object, because all filter chains of a mesh share a few
    formats.

    Raises:
        ConfigError: unknown command, missing or unexpected argument, or a lone ``%``.
    """
    parts: list[str | Command] = []
    position = 0
    while position < len(text):
        percent = text.find("%", position)
        if percent < 0:
            parts.append(text[position:])
            break
        if percent > position:
            parts.append(text[position:percent])
        if text.startswith("%%", percent):
            parts.append("%")
            position = percent + 2
            continue
        found = _COMMAND.match(text, percent)
        if found is None:
            raise ConfigError(f"format string: '%' at offset {percent} starts no command in {text!r}")
        parts.append(_command(found))
        position = found.end()
    return FormatString(tuple(parts))


def _command(found: "re.Match[str]") -> Command:
    name, argument, length = found.groups()
    takes = COMMANDS.get(name, ...)
    if takes is ...:
        raise ConfigError(f"format string: unknown command %{name}%")
    if takes is True and not argument:
        raise ConfigError(f"format string: %{name}% needs an argument")
    if takes is False and argument is not None:
        raise ConfigError(f"format string: %{name}% takes no argument")
    if takes is False and length is not None:
        raise ConfigError(f"format string: %{name}% takes no length")
    if name == "METADATA":
        kind, _, argument = argument.partition(":")
        if kind not in METADATA_KINDS:
            known = ", ".join(METADATA_KINDS)
            raise ConfigError(f"format string: %METADATA({kind})% is not supported here, {known} are")
        name = METADATA_KINDS[kind]
        if not argument:
            raise ConfigError("format string: %METADATA% needs a namespace")
    if name == "QUERY_PARAMS" and argument not in (None, "ORIG", "DECODED"):
        raise ConfigError(f"format string: Invalid QUERY_PARAMS option: '{argument}', only ORIG and DECODED are")
    if name == "PATH" and argument not in (None, "WQ", "NQ"):
        raise ConfigError(f"format string: %PATH({argument})% is not supported here, WQ and NQ are")
    if name in _OF_HEADERS and argument.count("?") > 1:
        raise ConfigError(f"format string: More than 1 alternative header specified in token: {argument}")
    if name == "FILTER_STATE":
        _check_filter_state(argument)
    if name == "GRPC_STATUS" and argument not in (None, "CAMEL_STRING", "SNAKE_STRING", "NUMBER"):
        known = "CAMEL_STRING, SNAKE_STRING or NUMBER"
        raise ConfigError(f"format string: %GRPC_STATUS% only supports {known}, not {argument}")
    if argument and name in ("DYNAMIC_METADATA", "UPSTREAM_METADATA", "CLUSTER_METADATA"):
        argument = _colon_form(argument)
    return Command(name, argument or "", int(length) if length else None)


def _check_filter_state(argument: str) -> None:
    key, _, rest = argument.partition(":")
    form, _, name = rest.partition(":")
    if not key:
        raise ConfigError("format string: Invalid filter state configuration, key cannot be empty")
    if form not in ("", "PLAIN", "TYPED", "FIELD"):
        raise ConfigError("format string: Invalid filter state serialize type, only support PLAIN/TYPED/FIELD")
    if form == "FIELD" and not name:
        raise ConfigError("format string: Invalid filter state serialize type, FIELD needs a name")


def _colon_form(argument: str) -> str:
    """Rewrite an argument like ``["tunnel", "destination"]`` as ``tunnel:destination``. Others are returned
    unchanged.
    """
    if not argument.startswith("["):
        return argument
    try:
        keys = json.loads(argument)
    except ValueError as error:
        raise ConfigError(f"format string: bad key list {argument!r}") from error
    if not keys or not all(isinstance(key, str) for key in keys):
        raise ConfigError(f"format string: bad key list {argument!r}")
    return ":".join(keys)
