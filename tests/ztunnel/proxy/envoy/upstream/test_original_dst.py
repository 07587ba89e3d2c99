"""The hosts of an ORIGINAL_DST cluster."""

from types import SimpleNamespace
from typing import Any, cast

from xds.model.address import SocketAddress
from xds.model.cluster import Endpoint
from ztunnel.proxy.envoy.admin.clusters import hosts_of
from ztunnel.proxy.envoy.upstream.original_dst import OriginalHosts


def test_a_page_of_hosts_ends_well_while_connections_add_and_remove_hosts() -> None:
    model, now_s = SimpleNamespace(name="passthrough", cleanup_interval_s=5.0), 0.0
    hosts = OriginalHosts(cast(Any, model), cast(Any, SimpleNamespace(changes=0)), cast(Any, None))

    def connect(number: int) -> None:
        hosts.host_at(Endpoint(address=SocketAddress(f"192.0.2.{number}", 80)), now_s)

    connect(1)
    connect(2)
    shown = cast(Any, SimpleNamespace(original=hosts, hosts_shown=SimpleNamespace(levels=(), get=lambda _: None)))
    page = hosts_of(shown)
    found = [str(next(page)[0].endpoint.address)]
    connect(3)
    hosts.remove_unused(10.0)
    found += (str(host.endpoint.address) for host, _ in page)
    assert found == ["192.0.2.1:80", "192.0.2.2:80"]
    assert not len(hosts)
