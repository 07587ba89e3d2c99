"""Settings and bootstrap: every bad value named, all together."""

from pathlib import Path

import pytest

from xds.errors import ConfigError
from xds.model.address import SocketAddress
from xds.model.tls import AdsSource, FileSource, GrpcSource
from ztunnel.cli import main
from ztunnel.proxy.envoy.config.bootstrap import bootstrap_for, load_bootstrap, read_bootstrap
from ztunnel.proxy.envoy.config.settings import Switches, TunnelSource, settings_from
from ztunnel.proxy.tap.request import VARIABLE
from ztunnel.runtime.settings import SettingsError

REFERENCE = Path(__file__).parents[4] / "data" / "reference"
CONTROL = {"ZTUNNEL_CONTROL_PLANE": "unix:/x", "NODE_NAME": "n"}


def test_settings_have_defaults() -> None:
    settings = settings_from({}, CONTROL)
    assert settings.admin == SocketAddress("127.0.0.1", 15000)
    assert settings.switches == Switches()
    assert settings.switches.tunnel_source is TunnelSource.CLIENT_POD


def test_a_flag_wins_over_its_variable() -> None:
    settings = settings_from({"drain_s": "5m", "admin": "off"}, {**CONTROL, "ZTUNNEL_DRAIN_TIME": "7s"})
    assert settings.drain_s == 300
    assert settings.admin is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("2", 2.0), ("500ms", 0.5), ("1.5s", 1.5), ("2m", 120.0), ("1h", 3600.0)]
)
def test_durations_are_parsed(text: str, seconds: float) -> None:
    assert settings_from({"shutdown_s": text}, CONTROL).shutdown_s == seconds


def test_port_alone_listens_on_every_address() -> None:
    assert settings_from({"metrics": "9100"}, CONTROL).metrics == SocketAddress("0.0.0.0", 9100)


def test_taps_are_permitted_by_the_path_of_a_socket() -> None:
    assert settings_from({}, CONTROL).tap_socket == ""
    assert settings_from({}, {**CONTROL, VARIABLE: "/run/tap.sock"}).tap_socket == "/run/tap.sock"
    assert settings_from({"tap_socket": "/run/a"}, {**CONTROL, VARIABLE: "/run/tap.sock"}).tap_socket == "/run/a"
    with pytest.raises(SettingsError, match=r"--tap-socket=/x+: must be at most 107 bytes long"):
        settings_from({"tap_socket": f"/{'x' * 107}"}, CONTROL)


def test_single_switch_wins_over_envoy_compat() -> None:
    compat = settings_from({}, {**CONTROL, "ZTUNNEL_ENVOY_COMPAT": "true", "ZTUNNEL_STRICT_TLS": "true"}).switches
    assert compat == Switches(
        route_timeouts=True,
        node_local_shortcut=False,
        early_data=False,
        check_authority=False,
        judge_ports=False,
        strict_tls=True,
        tunnel_source=TunnelSource.ENVOY,
    )


def test_all_faults_are_reported_together() -> None:
    env = {
        "ZTUNNEL_DRAIN_TIME": "soon",
        "ZTUNNEL_ADMIN_ADDRESS": "nowhere:1",
        "ZTUNNEL_STRICT_TLS": "yes",
        "ZTUNNEL_TUNNEL_SOURCE": "mars",
        "ZTUNNEL_LOG_LEVEL": "loud",
        "ZTUNNEL_SPIN_US": "-1",
        "ZTUNNEL_TAP_SOCKET": "run/tap.sock",
        "ZTUNNEL_TYPO": "x",
    }
    with pytest.raises(SettingsError) as error:
        settings_from({"metrics": "99999"}, env)
    faults = "\n".join(error.value.faults)
    for words in (
        "ZTUNNEL_DRAIN_TIME=soon",
        "ZTUNNEL_ADMIN_ADDRESS=nowhere:1",
        "ZTUNNEL_STRICT_TLS=yes: must be true or false",
        "ZTUNNEL_TUNNEL_SOURCE=mars",
        "ZTUNNEL_LOG_LEVEL=loud: must be one of",
        "ZTUNNEL_SPIN_US=-1: must be a whole number, not negative",
        "ZTUNNEL_TAP_SOCKET=run/tap.sock: must be an absolute path",
        "ZTUNNEL_TYPO: no such variable",
        "--metrics=99999",
        "give --bootstrap FILE, or --control-plane ADDRESS",
    ):
        assert words in faults


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"control_plane": "unix:/x"}, "--control-plane needs --node"),
        ({"control_plane": "unix:/x", "node": "n", "bootstrap": "/no"}, "exclude each other"),
        ({"bootstrap": "/no/such"}, "--bootstrap /no/such: no such file"),
        ({"control_plane": "unix:/x", "node": "n"}, "--replace .* needs --handover-dir"),
        ({"control_plane": "unix:/x", "node": "n", "handover_dir": "here"}, "must be an absolute path"),
    ],
)
def test_conflicting_or_incomplete_flags_are_refused(flags: dict[str, str | None], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        settings_from(flags, {"ZTUNNEL_REPLACE": "true"})


def test_replace_uses_the_handover_folder() -> None:
    flags: dict[str, str | None] = {"control_plane": "unix:/x", "node": "n", "handover_dir": "/run/ztunnel"}
    found = settings_from(flags, {"ZTUNNEL_REPLACE": "true"})
    assert (found.handover_dir, found.replace) == ("/run/ztunnel", True)


def test_the_reference_bootstrap() -> None:
    config = load_bootstrap(str(REFERENCE / "w2/bootstrap.yaml"))
    assert config.admin == SocketAddress("127.0.0.1", 15000)
    assert config.ads is None
    assert config.lds is not None
    assert config.lds.source == FileSource("./w2/lds.yaml")
    assert config.lds.timeout_s == 15


@pytest.mark.parametrize("target", ["unix:/run/x.sock", "istiod.example:15010", "[::1]:15010"])
@pytest.mark.parametrize("delta", [False, True])
def test_a_bootstrap_made_up_for_a_control_plane(target: str, delta: bool) -> None:
    config = read_bootstrap(bootstrap_for(target, "worker", delta=delta, admin=None))
    assert config.ads == GrpcSource("xds-grpc", delta)
    assert {name: found.address for name, found in config.targets.items()} == {"xds-grpc": target}
    assert config.lds is not None
    assert (config.lds.source, config.lds.timeout_s) == (AdsSource(), 0)
    assert config.message.node.metadata["NODE_NAME"] == "worker"


@pytest.mark.parametrize("target", ["nowhere", "host:", "host:0", "host:99999"])
def test_a_control_plane_without_port_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="--control-plane: not host:port or unix:/path"):
        bootstrap_for(target, "worker", delta=False, admin=None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("node: [", "bootstrap.yaml"),
        ("no_such_field: 1", "no_such_field: no such field"),
        ("admin: {address: {socket_address: {address: x, port_value: 1}}}", "malformed IP address: x"),
        ("admin: {address: {socket_address: {address: 127.0.0.1, port_value: x}}}", "port_value"),
        (
            "dynamic_resources: {ads_config: {api_type: GRPC, "
            "grpc_services: [{envoy_grpc: {cluster_name: gone}}]}}",
            "no static cluster 'gone'",
        ),
        ("dynamic_resources: {ads_config: {api_type: REST}}", "ads_config.api_type: only gRPC"),
        ("dynamic_resources: {lds_config: {}}", "lds_config.config_source_specifier"),
    ],
)
def test_a_bad_bootstrap_is_refused_by_place(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bootstrap.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_bootstrap(str(path))
    assert words in str(error.value)


# The command line


def test_bad_flags_exit_with_2_and_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["proxy", "--drain", "never", "--admin", "x"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("ztunnel: ") for line in lines)


def test_validate_lists_every_fault_of_every_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
    secret = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"
    socket = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
    (tmp_path / "sds.yaml").write_text(
        f'resources: [{{"@type": {secret}, name: s, tls_certificate: {{certificate_chain: {{inline_string: x}}, '
        "private_key: {inline_string: yy}}}]"
    )
    (tmp_path / "cds.yaml").write_text(
        f"""
        resources:
        - {{"@type": {kind}, name: one, type: ORIGINAL_DST}}
        - {{"@type": {kind}, name: two, typo: 1}}
        - "@type": {kind}
          name: three
          transport_socket:
            name: tls
            typed_config:
              "@type": {socket}
              common_tls_context:
                tls_certificate_sds_secret_configs:
                - {{name: s, sds_config: {{path_config_source: {{path: {tmp_path}/sds.yaml}}}}}}
        """
    )
    bootstrap = tmp_path / "bootstrap.yaml"
    bootstrap.write_text(
        f"dynamic_resources: {{cds_config: {{path_config_source: {{path: {tmp_path}/cds.yaml}}}}, "
        f"lds_config: {{path_config_source: {{path: {tmp_path}/gone.yaml}}}}}}"
    )
    assert main(["proxy", "--bootstrap", str(bootstrap), "--validate"]) == 1
    out = capsys.readouterr().out
    for words in (
        "cds.yaml: resources[0] (one): cluster: LB policy ROUND_ROBIN is not valid",
        "cds.yaml: resources[1].typo: no such field",
        "gone.yaml: cannot read",
        "sds.yaml: resources[0] (s): tls_certificate.certificate_chain: no certificate",
    ):
        assert words in out


def test_validate_accepts_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w1").symlink_to(REFERENCE / "w1")
    assert main(["proxy", "--bootstrap", "w1/bootstrap.yaml", "--validate"]) == 1
    # Only the certificates are missing, which differ at every site.
    faults = capsys.readouterr().out.splitlines()
    assert [fault for fault in faults if "certs/" not in fault] == []
    assert len(faults) == 2


def test_help_names_every_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["proxy", "--help"])
    text = capsys.readouterr().out
    for variable in ("ZTUNNEL_BOOTSTRAP", "ZTUNNEL_TUNNEL_SOURCE", "NODE_NAME", "ZTUNNEL_SPIN_US"):
        assert variable in text


def test_service_variables_of_kubernetes_are_ignored() -> None:
    """Kubernetes gives them to every pod of a namespace that has a Service whose name begins so."""
    links = {
        "ZTUNNEL_SERVICE_HOST": "10.96.0.7",
        "ZTUNNEL_SERVICE_PORT_HBONE": "15008",
        "ZTUNNEL_PORT": "tcp://10.96.0.7:15008",
        "ZTUNNEL_PORT_15008_TCP_ADDR": "10.96.0.7",
        "ZTUNNEL_METRICS_SERVICE_HOST": "10.96.0.8",
        "ZTUNNEL_METRICS_SERVICE_PORT": "15020",
        "ZTUNNEL_METRICS_PORT": "tcp://10.96.0.8:15020",
        "ZTUNNEL_METRICS_PORT_15020_TCP": "tcp://10.96.0.8:15020",
        "ZTUNNEL_METRICS_PORT_15020_TCP_ADDR": "10.96.0.8",
        "ZTUNNEL_DNS_2_PORT_53_UDP_PROTO": "udp",
        "ZTUNNEL_SPIN_SERVICE_PORT_HTTP": "1",
    }
    assert settings_from({}, {**CONTROL, **links}).warnings == ()


@pytest.mark.parametrize(
    "name", ["ZTUNNEL_METRICS_PORT", "ZTUNNEL_PORT", "ZTUNNEL_METRICS_ADDRES", "ZTUNNEL_SERVICE_HOSTS"]
)
def test_unknown_variable_like_a_service_variable_is_an_error(name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}: no such variable"):
        settings_from({}, {**CONTROL, name: "15020"})
