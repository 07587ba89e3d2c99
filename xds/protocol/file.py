"""Reads a watched file: a ``DiscoveryResponse`` as YAML, JSON, binary or text protobuf.

Like in Envoy, the file's name selects the form: ``.yaml``, ``.yml``, ``.json``, ``.pb`` (binary) or ``.pb_text``.
Any other file is read as YAML, which includes JSON.
"""

from dataclasses import dataclass

from xds.errors import ConfigError
from xds.proto import json, registry
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import DiscoveryResponse
from xds.proto.pool import POOL
from xds.proto.unknown import UnknownField
from xds.protocol.client_state import BadResponse
from xds.protocol.resource import Update
from xds.protocol.sotw import resources_of
from xds.protocol.types import COMPLETE_TYPES, SDS


@dataclass(frozen=True, slots=True, kw_only=True)
class FileContent:
    """A parsed file.

    Attributes:
        unknown_fields: fields that our version of the messages lacks. The file is refused because of these fields.
    """

    response: DiscoveryResponse
    unknown_fields: tuple[UnknownField, ...] = ()


def parse_file(name: str, data: bytes) -> FileContent:
    """Read a file's content.

    Raises:
        ConfigError: the content is not a ``DiscoveryResponse`` in the format of the file's name.
    """
    suffix = name.rpartition("/")[2].rpartition(".")[2].lower()
    if suffix == "pb":
        try:
            message = registry.parse(registry.type_url(DiscoveryResponse), data)
        except registry.MalformedMessage as error:
            raise ConfigError(str(error)) from None
        assert isinstance(message, DiscoveryResponse)
        return FileContent(response=message)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 at byte {error.start}") from None
    if suffix == "pb_text":
        from google.protobuf import text_format  # a megabyte that few proxies need

        registry.import_all()  # the parser itself looks up the types of Anys
        response = DiscoveryResponse()
        try:
            text_format.Parse(text, response, descriptor_pool=POOL)
        except text_format.ParseError as error:
            raise ConfigError(f"not valid text protobuf: {error}") from None
        return FileContent(response=response)
    parsed = json.parse_text(text, DiscoveryResponse, name=name)
    return FileContent(response=parsed.message, unknown_fields=parsed.unknown_fields)


def update_of(response: DiscoveryResponse, type_url: str, names: frozenset[str] | None) -> Update:
    """Return the part of a file that one subscription requests. If ``names`` is None, it requests all resources.

    A file for secrets must contain exactly the requested one.

    Raises:
        ConfigError: duplicates, resources of another type, or the wrong number of secrets, in Envoy's words.
    """
    try:
        resources, _ = resources_of(response, type_url)
    except BadResponse as bad:
        raise ConfigError(str(bad)) from None
    if type_url == SDS and names is not None:
        if len(resources) != 1:
            raise ConfigError(
                f"Unexpected SDS secrets length for {', '.join(sorted(names))}, number of added resources "
                f"{len(resources)}, number of removed resources 0. Expected sum is 1"
            )
        if resources[0].name not in names:
            raise ConfigError(f"Unexpected SDS secret (expecting {', '.join(sorted(names))}): {resources[0].name}")
    return Update(
        type_url=type_url,
        version=response.version_info,
        resources=tuple(resource for resource in resources if names is None or resource.name in names),
        complete=type_url in COMPLETE_TYPES,
    )
