"""Changes load assignments: replaces host names by addresses, or adds hosts that stay in use although discovery
has removed them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from xds.model.address import NamedAddress, SocketAddress
from xds.model.cluster import Endpoint, LoadAssignment, LocalityGroup
from ztunnel.proxy.envoy.upstream.host import Host


def resolved(assignment: LoadAssignment, known: Mapping[str, tuple[str, ...]]) -> LoadAssignment:
    """Return ``assignment`` with each host name replaced by its addresses in ``known``."""
    groups = []
    for group in assignment.groups:
        endpoints: list[Endpoint] = []
        for endpoint in group.endpoints:
            address = endpoint.address
            if not isinstance(address, NamedAddress):
                endpoints.append(endpoint)
                continue
            hostname = endpoint.hostname or address.name
            found = (SocketAddress(host, address.port) for host in known.get(address.name, ()))
            endpoints.extend(replace(endpoint, address=each, hostname=hostname) for each in found)
        groups.append(replace(group, endpoints=tuple(endpoints)))
    return replace(assignment, groups=tuple(groups))


def with_hosts(assignment: LoadAssignment, hosts: Iterable[Host]) -> LoadAssignment:
    """Return an assignment with the endpoints of ``hosts`` added, each at its locality and priority."""
    groups = list(assignment.groups)
    for host in hosts:
        endpoint = host.endpoint
        for index, group in enumerate(groups):
            if (group.locality, group.priority) == (endpoint.locality, endpoint.priority):
                groups[index] = replace(group, endpoints=(*group.endpoints, endpoint))
                break
        else:
            groups.append(
                LocalityGroup(
                    locality=endpoint.locality, priority=endpoint.priority, weight=0, endpoints=(endpoint,)
                )
            )
    return replace(assignment, groups=tuple(groups))
