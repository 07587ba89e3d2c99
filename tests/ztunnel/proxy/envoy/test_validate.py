"""``--validate`` lists every fault of a resource, each with its path, and no fault that another one causes."""

from pathlib import Path

import pytest

from ztunnel.proxy.envoy.validate import findings_of_file

PROXY = '"@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy'
REDIS = '"@type": type.googleapis.com/envoy.extensions.filters.network.redis_proxy.v3.RedisProxy'
BOOTSTRAP = f"""
static_resources:
  listeners:
  - name: in
    address: {{socket_address: {{address: 127.0.0.1, port_value: 15001}}}}
    filter_chains:
    - filters:
      - {{name: a, typed_config: {{{PROXY}, stat_prefix: a, cluster: c, on_demand: {{}}}}}}
    - filters:
      - {{name: x, typed_config: {{{REDIS}}}}}
    - filters: []
    - filters:
      - {{name: b, typed_config: {{{PROXY}, stat_prefix: a}}}}
    listener_filters:
    - {{name: yy, typed_config: {{{REDIS}}}}}
  clusters:
  - name: c
    type: STATIC
    load_assignment:
      cluster_name: c
      endpoints:
      - lb_endpoints:
        - {{endpoint: {{address: {{socket_address: {{address: not-an-ip, port_value: 80}}}}}}}}
        - {{endpoint: {{address: {{socket_address: {{address: 10.0.0.1, port_value: 99999}}}}}}}}
"""


def test_every_fault_is_listed_with_its_path(tmp_path: Path) -> None:
    file = tmp_path / "bootstrap.yaml"
    file.write_text(BOOTSTRAP)
    places = [
        fault.removeprefix(f"{file}: static_resources.").split(": ")[:2]
        for fault in findings_of_file(str(file)).faults
    ]
    endpoint = "load_assignment.endpoints[0].lb_endpoints[{}].endpoint.address.socket_address.{}"
    assert places == [
        ["clusters[0] (c)", endpoint.format(0, "address")],
        ["clusters[0] (c)", endpoint.format(1, "port_value")],
        ["listeners[0] (in)", "filter_chains[0].filters[0].typed_config.on_demand"],
        ["listeners[0] (in)", "filter_chains[1].filters[0].typed_config"],
        ["listeners[0] (in)", "filter_chains[2].filters"],
        ["listeners[0] (in)", "filter_chains[3].filters[0].typed_config.cluster_specifier"],
        ["listeners[0] (in)", "listener_filters[0].typed_config"],
    ]


NETWORK = "type.googleapis.com/envoy.extensions.filters.network"
HCM = f'"@type": {NETWORK}.http_connection_manager.v3.HttpConnectionManager'
TLS = '"@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext'
STDOUT = '"@type": type.googleapis.com/envoy.extensions.access_loggers.stream.v3.StdoutAccessLog'
LOG = f"[{{name: l, typed_config: {{{STDOUT}, log_format: {{text_format: '%NOPE%'}}}}}}]"
PARTS = f"""
static_resources:
  listeners:
  - name: in
    address: {{socket_address: {{address: nowhere, port_value: 1}}}}
    access_log: {LOG}
    filter_chains:
    - transport_socket:
        name: tls
        typed_config:
          {TLS}
          common_tls_context:
            tls_certificates:
            - {{certificate_chain: {{filename: /nonexistent/a}}, private_key: {{filename: /nonexistent/b}}}}
            validation_context: {{trusted_ca: {{filename: /nonexistent/c}}}}
      filters:
      - name: h
        typed_config:
          {HCM}
          stat_prefix: h
          http2_protocol_options: {{hpack_table_size: 1}}
          access_log: {LOG}
          route_config:
            virtual_hosts:
            - name: v
              domains: ["*"]
              routes:
              - {{match: {{connect_matcher: {{}}}}, route: {{cluster: c, retry_policy: {{retry_on: 5xx}}}}}}
"""


def test_a_fault_of_one_part_hides_none_of_another(tmp_path: Path) -> None:
    file = tmp_path / "bootstrap.yaml"
    file.write_text(PARTS)
    where = f"{file}: static_resources.listeners[0] (in): "
    manager = "filter_chains[0].filters[0].typed_config"
    tls = "filter_chains[0].transport_socket.typed_config.common_tls_context"
    places = [fault.removeprefix(where).split(": ")[0] for fault in findings_of_file(str(file)).faults]
    assert places == [
        f"{manager}.http_filters",
        f"{manager}.http2_protocol_options.hpack_table_size",
        f"{manager}.route_config.virtual_hosts[0].routes[0].route.retry_policy.retry_on",
        f"{manager}.access_log[0].typed_config.log_format",
        f"{tls}.validation_context.trusted_ca.filename",
        f"{tls}.tls_certificates[0].certificate_chain.filename",
        f"{tls}.tls_certificates[0].private_key.filename",
        "address.socket_address.address",
        "access_log[0].typed_config.log_format",
    ]


T = "type.googleapis.com/envoy.extensions.filters"
RBAC = f'"@type": {T}.network.rbac.v3.RBAC'


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        (f"{{{RBAC}, stat_prefix: r}}", ""),
        (f"{{{RBAC}}}", "stat_prefix: Proto constraint"),
        (
            f"{{{PROXY}, stat_prefix: a, cluster: c}}",
            "tcp_proxy.v3.TcpProxy is not among the listener's type_urls",
        ),
    ],
)
def test_discovered_filter_is_validated_like_its_references(tmp_path: Path, config: str, fault: str) -> None:
    found, file = tmp_path / "ecds.yaml", tmp_path / "bootstrap.yaml"
    kind = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig"
    found.write_text(f'resources: [{{"@type": {kind}, name: guard, typed_config: {config}}}]')
    discovery = f"config_source: {{path_config_source: {{path: {found}}}}}, type_urls: [{T}.network.rbac.v3.RBAC]"
    file.write_text(f"""
static_resources:
  listeners:
  - name: in
    address: {{socket_address: {{address: 127.0.0.1, port_value: 15001}}}}
    filter_chains:
    - filters:
      - {{name: guard, config_discovery: {{{discovery}}}}}
      - {{name: a, typed_config: {{{PROXY}, stat_prefix: a, cluster: c}}}}
  clusters: [{{name: c}}]
""")
    faults = findings_of_file(str(file)).faults
    assert [each.startswith(f"{found}: resources[0] (guard): typed_config") for each in faults] == [True] * bool(
        fault
    )
    assert fault in "".join(faults)


LISTENERS = """
- {name: one, address: ADDRESS, filter_chains: [{filters: [PROXY]}]}
- {name: two, address: ADDRESS, filter_chains: [{filters: [PROXY]}]}
""".replace("PROXY", f"{{name: a, typed_config: {{{PROXY}, stat_prefix: a, cluster: c}}}}")


@pytest.mark.parametrize("port", [15001, 0])
def test_a_second_listener_at_one_address_is_a_fault(tmp_path: Path, port: int) -> None:
    address = f"{{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}"
    one, two = LISTENERS.replace("ADDRESS", address).strip().splitlines()
    file, lds = tmp_path / "bootstrap.yaml", tmp_path / "lds.yaml"
    source = f"{{path_config_source: {{path: {lds}}}}}"
    file.write_text(
        f"static_resources:\n  listeners:\n  {one}\ndynamic_resources: {{lds_config: {source}}}\n"
        "admin: {address: {socket_address: {address: 127.0.0.1, port_value: 0}}}\n"
    )
    listener = two.removeprefix("- {")
    lds.write_text(f'resources:\n- {{"@type": type.googleapis.com/envoy.config.listener.v3.Listener, {listener}\n')
    fault = (
        f"{lds}: resources[0] (two): error adding listener: 'two' has duplicate address '127.0.0.1:{port}' "
        "as existing listener"
    )
    assert findings_of_file(str(file)).faults == ([fault] if port else [])
