"""Finds the names of entries in a ``config_dump`` of either dialect. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

#: The keys whose value is the name of a dump's entry.
_NAMES: Final = ("name", "hostname", "uid", "identity", "policy", "cluster_name")
#: The keys under which an entry of Envoy's dumps contains the named resource.
_INNER: Final = (
    *("cluster", "listener", "secret", "route_config", "endpoint_config"),
    *("active_state", "warming_state", "draining_state"),
)


def names_of(entry: Any) -> Iterator[str]:
    """Yield the names that an entry can be requested by, the longest last."""
    if not isinstance(entry, Mapping):
        return
    for key in _INNER:
        yield from names_of(entry.get(key))
    namespace = entry.get("namespace")
    own = [str(entry[key]) for key in _NAMES if isinstance(entry.get(key), str)]
    yield from own
    if namespace:
        yield from (f"{namespace}/{each}" for each in own[:2])
