"""Scenarios of requests, and of configuration from other sources: the second suite of ``beside``.

It covers routes and connection managers, files and control planes of discovery, secrets, health checks by HTTP and
gRPC, log formats, filter state, metadata, and headers of tunnels.
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import ssl
from pathlib import Path
from typing import Any

from tests.interop import beside
from tests.interop.beside import Client, Scenario, Suite, plain, rest, tls, to
from tests.interop.loopback import Tunnels
from tests.interop.request_headers import answer
from tests.interop.source_site import applications, bootstrap, from_file
from tests.ztunnel.proxy.envoy.harness import Json, T, chain, connection_manager, tcp

WAIT_S = beside.WAIT_S
Headers = tuple[tuple[str, str], ...]


# Clients


def request(path: str = "/", *, method: str = "GET", headers: Headers = ()) -> Client:
    """Make one HTTP/2 request. Return the status, the server and the body."""

    def ask(port: int, _: Path) -> str:
        head = [(":method", method), (":scheme", "http"), (":authority", "a.example"), (":path", path)]
        with socket.create_connection(("127.0.0.1", port), WAIT_S) as sock:
            return answer(sock, [*head, *headers])

    return ask


def tunnel(*, headers: Headers = (), original: str = "", wait_s: float = WAIT_S) -> Client:
    """Open a tunnel, send, and wait for its end. ``original``: the header with the destination."""

    def ask(port: int, folder: Path) -> str:
        app = json.loads((folder / "ports.json").read_text())["one"]
        more = [*headers, *([(original, f"127.0.0.1:{app}")] if original else [])]
        with socket.create_connection(("127.0.0.1", port), wait_s) as sock:
            tunnels = Tunnels(sock)
            try:
                tunnels.connect(1, *more)
                tunnels.until("1:200", "1:end", "1:reset")
                if tunnels.seen == ["1:200"]:
                    tunnels.say(1, b"?")
                tunnels.until("1:end", "1:reset")
            except TimeoutError:
                tunnels.seen.append("open")
            return " ".join(tunnels.seen)

    return ask


def silent(port: int, _: Path) -> str:
    """A client that sends nothing, and waits for the other side's end."""
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as sock, contextlib.suppress(ConnectionError):
        return "data" if sock.recv(1) else "closed"
    return "closed"


def presenting(name: str) -> Client:
    """A client over TLS with a certificate of the folder."""

    def ask(port: int, folder: Path) -> str:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if name:
            context.load_cert_chain(folder / f"{name}.pem")
        try:
            with (
                socket.create_connection(("127.0.0.1", port), WAIT_S) as raw,
                context.wrap_socket(raw, server_hostname="server.example") as sock,
            ):
                return beside.said(sock)
        except OSError:
            return "closed"

    return ask


# Routes and managers


def manages(*routes: Json, table: Json | None = None, **manager: Any) -> Any:
    """A listener whose manager has these routes."""
    found: Json = {
        "name": "r",
        "virtual_hosts": [{"name": "v", "domains": ["*"], "routes": list(routes)}],
        **(table or {}),
    }
    made = connection_manager({"route_config": found})
    made["typed_config"] |= manager
    return to(chain(made))


def says(status: int, match: Json | None = None, **body: Any) -> Json:
    """Return a route with a direct response."""
    direct: Json = {"status": status, **({"body": body} if body else {})}
    return {"match": match or {"prefix": "/"}, "direct_response": direct}


def connects(target: str, **more: Any) -> Json:
    """A route that ends tunnels, towards a cluster or, if that is empty, as ``more`` says."""
    upgrade = [{"upgrade_type": "CONNECT", "connect_config": {}}]
    where = {"cluster": target} if target else {}
    return {"match": {"connect_matcher": {}}, "route": {"upgrade_configs": upgrade, **where, **more}}


REGEX: Json = {"google_re2": {}, "regex": "ab.*"}
HEADERS: dict[str, Json] = {
    "exact_match": {"exact_match": "abc"},
    "prefix_match": {"prefix_match": "ab"},
    "suffix_match": {"suffix_match": "bc"},
    "contains_match": {"contains_match": "b"},
    "safe_regex_match": {"safe_regex_match": REGEX},
    "string_match": {"string_match": {"exact": "ABC", "ignore_case": True}},
}
_VALUES = ("abc", "ab", "bc", "xabcx", "ABC", "")
_ASKED = (request(), *(request(headers=(("x-a", value),)) for value in _VALUES))
_OF_ROUTES = {"log_format": {"text_format_source": {"inline_string": "%RESPONSE_CODE% %ROUTE_NAME%\n"}}}


def _by_header(**more: Any) -> Scenario:
    return Scenario(manages(says(201, {"prefix": "/", "headers": [{"name": "x-a", **more}]}), says(202)), _ASKED)


SCENARIOS: dict[str, Scenario] = {f"header, {name}": _by_header(**match) for name, match in HEADERS.items()}
SCENARIOS |= {
    f"header, inverted {name}": _by_header(**match, invert_match=True)
    for name, match in (*HEADERS.items(), ("present_match", {"present_match": True}))
}
_FILES = "%DOWNSTREAM_LOCAL_ADDRESS_WITHOUT_PORT% %RESPONSE_FLAGS% %UPSTREAM_CLUSTER%"
_PATHS = tuple(request(path) for path in ("/ab", "/ab/c", "/abc", "/ab?c", "/x"))
SCENARIOS |= {
    "path_separated_prefix": Scenario(manages(says(201, {"path_separated_prefix": "/ab"}), says(202)), _PATHS),
    "safe_regex": Scenario(
        manages(says(201, {"safe_regex": {"google_re2": {}, "regex": "/a[b-z]"}}), says(202)), _PATHS
    ),
    "route's name": Scenario(manages({**says(201), "name": "its-name"}), (request(),), form=_OF_ROUTES),
    "body of bytes": Scenario(manages(says(200, inline_bytes=base64.b64encode(b"hi").decode())), (request(),)),
    "body of the environment": Scenario(manages(says(200, environment_variable="HOME")), (request(),)),
    "longest body": Scenario(
        manages(says(200, inline_string="a" * 5000), table={"max_direct_response_body_size_bytes": 5000}),
        (request(),),
    ),
    "server_name": Scenario(manages(says(200), server_name="its-name"), (request(),)),
    "server_header_transformation": Scenario(
        manages(says(200), server_header_transformation="APPEND_IF_ABSENT"), (request(),)
    ),
    "max_request_headers_kb": Scenario(
        manages(says(200), max_request_headers_kb=1), (request(), request(headers=(("x-a", "a" * 2000),)))
    ),
    "an HTTP filter that is disabled": Scenario(
        manages(
            says(200),
            http_filters=[
                {
                    "name": "rbac",
                    "disabled": True,
                    "typed_config": {"@type": f"{T}envoy.extensions.filters.http.rbac.v3.RBAC", "rules": {}},
                },
                {"name": "r", "typed_config": {"@type": f"{T}envoy.extensions.filters.http.router.v3.Router"}},
            ],
        ),
        (request(),),
    ),
    "stream_idle_timeout": Scenario(manages(connects("echo"), stream_idle_timeout="0.3s"), (tunnel(),)),
    "a route's idle_timeout": Scenario(
        manages(connects("echo", idle_timeout="0.3s"), stream_idle_timeout="90s"), (tunnel(),)
    ),
    "a route's timeout": Scenario(manages(connects("mute", timeout="0.3s")), (tunnel(wait_s=1.0),)),
    "weighted clusters of a route": Scenario(
        manages(connects("", weighted_clusters={"clusters": [{"name": "one", "weight": 1}]})),
        (tunnel(),),
    ),
    "cluster_not_found_response_code": Scenario(
        manages(
            connects("nowhere", cluster_not_found_response_code="NOT_FOUND"), table={"validate_clusters": False}
        ),
        (tunnel(),),
    ),
    "use_http_header": Scenario(
        manages(connects("by header")), (tunnel(original="x-envoy-original-dst-host"), tunnel())
    ),
    "http_header_name": Scenario(
        manages(connects("by other header")),
        (tunnel(original="x-to"), tunnel(original="x-envoy-original-dst-host")),
    ),
    "original destination by metadata": Scenario(to(chain(tcp("by metadata")))),
}

# Logs

_FIELDS = {"a": "%UPSTREAM_CLUSTER%", "b": "%REQUESTED_SERVER_NAME%", "c": "%BYTES_RECEIVED%", "d": {"e": "x"}}
FORMS: dict[str, Json] = {
    "format": {"format": f"{_FILES}\n"},
    "json_format": {"json_format": _FIELDS},
    "typed_json_format": {"typed_json_format": _FIELDS},
    "text_format": {"log_format": {"text_format": f"{_FILES}\n"}},
    "omit_empty_values": {"log_format": {"json_format": _FIELDS, "omit_empty_values": True}},
    "omit_empty_values, text": {
        "log_format": {
            "text_format_source": {"inline_string": "a%REQUESTED_SERVER_NAME%b\n"},
            "omit_empty_values": True,
        }
    },
}
SCENARIOS |= {f"log's {name}": Scenario(to(chain(tcp("one"))), form=form) for name, form in FORMS.items()}

# Listeners and filters

_NETWORK = f"{T}envoy.extensions.filters.network"
_PLAIN_STATE = {"log_format": {"text_format_source": {"inline_string": "%FILTER_STATE(envoy.string:PLAIN)%\n"}}}


def _state(key: str = "envoy.string", text: str = "x", **more: Any) -> Json:
    value = {
        "object_key": key,
        "format_string": {"text_format_source": {"inline_string": text}},
        **more,
    }
    config = {"@type": f"{_NETWORK}.set_filter_state.v3.Config", "on_new_connection": [value]}
    return {"name": "state", "typed_config": config}


def _rbac(permission: Json) -> Json:
    policy = {"permissions": [permission], "principals": [{"any": True}]}
    config = {"@type": f"{_NETWORK}.rbac.v3.RBAC", "stat_prefix": "r", "rules": {"policies": {"p": policy}}}
    return {"name": "rbac", "typed_config": config}


def _by_metadata(**more: Any) -> Scenario:
    wanted = {"filter": "f", "path": [{"key": "k"}], "value": {"string_match": {"exact": "v"}}, **more}
    return Scenario(to(chain(_rbac({"metadata": wanted}), tcp("one"))))


def _disabled_limit(enabled: bool) -> Scenario:
    switch = {"default_value": enabled, "runtime_key": "k"}
    config = {
        "@type": f"{_NETWORK}.local_ratelimit.v3.LocalRateLimit",
        "stat_prefix": "r",
        "token_bucket": {"max_tokens": 1, "tokens_per_fill": 1, "fill_interval": "60s"},
        "runtime_enabled": switch,
    }
    return Scenario(to(chain({"name": "r", "typed_config": config}, tcp("one"))), (plain(), plain()))


def _matching(source: str, value: Json, **more: Any) -> Any:
    entered = {"single_predicate": {"input": beside.network_input(source, **more), "value_match": value}}
    return beside.listed((entered, "one"))


_NAMES = {
    "@type": f"{T}xds.type.matcher.v3.ServerNameMatcher",
    "domain_matchers": [
        {"domains": ["a.example"], "on_match": beside.go("one")},
        {"domains": ["*.example"], "on_match": beside.go("two")},
    ],
}


def _by_names(folder: Path) -> Json:
    tree = {
        "input": beside.network_input("ServerNameInput"),
        "custom_match": {"name": "n", "typed_config": _NAMES},
    }
    chains = [rest(name, transport_socket=tls(folder)) for name in ("one", "two", "three")]
    return {
        "filter_chains": chains,
        "filter_chain_matcher": {"matcher_tree": tree, "on_no_match": beside.go("three")},
        "listener_filters": [beside.inspector("tls")],
    }


def _discovered(folder: Path, name: str, config: Json) -> Json:
    """Write a filter's configuration for discovery, and return its source."""
    kind = f"{T}envoy.config.core.v3.TypedExtensionConfig"
    return from_file(folder, name, {"@type": kind, "name": name, "typed_config": config})


def _finds_a_listener_filter(folder: Path) -> Json:
    inspects = beside.inspector("tls")["typed_config"]
    source = _discovered(folder, "inspects", inspects)
    discovery = {"config_source": source, "type_urls": [inspects["@type"]]}
    return {
        "filter_chains": [beside.matching({"transport_protocol": "tls"}, transport_socket=tls(folder)), rest()],
        "listener_filters": [{"name": "inspects", "config_discovery": discovery}],
    }


def _starts_with_the_default(folder: Path) -> Json:
    allows = _rbac({"any": True})["typed_config"]
    discovery = {
        "config_source": _discovered(folder, "guard", allows),
        "default_config": allows,
        "apply_default_config_without_warming": True,
        "type_urls": [allows["@type"]],
    }
    return {"filter_chains": [chain({"name": "guard", "config_discovery": discovery}, tcp("one"))]}


def _routes_from_a_file(folder: Path) -> Json:
    kind = f"{T}envoy.config.route.v3.RouteConfiguration"
    hosts = [{"name": "v", "domains": ["*"], "routes": [says(201)]}]
    source = from_file(folder, "routes", {"@type": kind, "name": "routes", "virtual_hosts": hosts})
    manager = connection_manager({"rds": {"route_config_name": "routes", "config_source": source}})
    return {"filter_chains": [chain(manager)]}


_ONE = base64.b64encode((1).to_bytes(4, "little")).decode()
_ORIGINAL = f"{T}envoy.extensions.filters.listener.original_src.v3.OriginalSrc"
_HEADERS: list[Json] = [
    {"header": {"key": "x-a", "value": "1"}},
    {"header": {"key": "x-a", "value": "2"}},
    {"header": {"key": "x-b", "value": "3"}, "append_action": "ADD_IF_ABSENT"},
    {"header": {"key": "x-b", "value": "4"}, "append_action": "ADD_IF_ABSENT"},
    {"header": {"key": "x-c", "value": "5"}, "append_action": "OVERWRITE_IF_EXISTS"},
    {"header": {"key": "x-d", "value": ""}, "keep_empty_value": True},
    {"header": {"key": "x-e", "value": ""}},
    {"header": {"key": "x-f", "value": "%REQUESTED_SERVER_NAME%"}},
    {"header": {"key": "x-g", "value": "6"}},
    {"header": {"key": "x-g", "value": "7"}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"},
    {"header": {"key": "x-g", "value": "8"}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"},
    {"header": {"key": "x-g", "value": "9"}},
    {"header": {"key": "x-h", "value": "10"}},
    {"header": {"key": "x-h", "value": "11"}, "append": False},
]
SCENARIOS |= {
    "nothing is bound": Scenario(to(chain(tcp("one")), bind_to_port=False), bound=False),
    "nothing is bound, as of old": Scenario(
        to(chain(tcp("one")), deprecated_v1={"bind_to_port": False}), bound=False
    ),
    "rds": Scenario(_routes_from_a_file, (request(),)),
    "transparent": Scenario(to(chain(tcp("one")), transparent=True)),
    "use_original_dst": Scenario(to(chain(tcp("one")), use_original_dst=True)),
    "mark": Scenario(
        to(
            chain(tcp("one")),
            listener_filters=[{"name": "o", "typed_config": {"@type": _ORIGINAL, "mark": 7}}],
        )
    ),
    "buf_value": Scenario(
        to(
            chain(tcp("one")),
            socket_options=[{"level": 1, "name": 9, "buf_value": _ONE, "state": "STATE_LISTENING"}],
        )
    ),
    "transport_socket_connect_timeout": Scenario(
        lambda folder: {
            "filter_chains": [
                rest("one", transport_socket=tls(folder), transport_socket_connect_timeout="0.3s"),
            ]
        },
        (silent,),
    ),
    "a listener filter that is discovered": Scenario(_finds_a_listener_filter, (beside.secured(), plain())),
    "apply_default_config_without_warming": Scenario(_starts_with_the_default),
    "FilterStateInput": Scenario(_matching("FilterStateInput", {"exact": "x"}, key="k")),
    "ServerNameMatcher": Scenario(
        _by_names, tuple(beside.secured(name=name) for name in ("a.example", "b.example", "a.b.example", "x"))
    ),
    "filter state of an object": Scenario(to(chain(_state(), tcp("one"))), form=_PLAIN_STATE),
    "filter state that is shared": Scenario(
        to(chain(_state(shared_with_upstream="ONCE"), tcp("one"))), form=_PLAIN_STATE
    ),
    "filter state that is skipped": Scenario(
        to(chain(_state(text="%REQUESTED_SERVER_NAME%", skip_if_empty=True), tcp("one"))), form=_PLAIN_STATE
    ),
    "cluster of filter state": Scenario(to(chain(_state("envoy.tcp_proxy.cluster", "two"), tcp("one")))),
    "metadata": _by_metadata(),
    "metadata, inverted": _by_metadata(invert=True),
    "limit by default": _disabled_limit(True),
    "limit that is disabled": _disabled_limit(False),
    "headers of a tunnel": Scenario(
        to(
            chain(
                tcp(
                    "tunnels",
                    tunneling_config={
                        "hostname": "x:1",
                        "headers_to_add": _HEADERS,
                        "propagate_response_headers": True,
                    },
                )
            )
        )
    ),
    "backoff_options": Scenario(
        to(
            chain(
                tcp(
                    "refusing",
                    max_connect_attempts=3,
                    backoff_options={"base_interval": "0.01s", "max_interval": "0.02s"},
                )
            )
        )
    ),
    **{
        name: Scenario(to(chain(tcp(name))))
        for name in (
            *("unix", "path", "service_name", "named endpoint", "ADS", "no control plane", "dropping half"),
            *("checked by HTTP", "checked by gRPC", "ALPN decides", "inside", "rotates", "resolvers as fallback"),
        )
    },
}

# Secrets


def _secret(folder: Path, name: str) -> Json:
    """A secret of a file, and its source."""
    server, root = {"filename": str(folder / "server.pem")}, {"filename": str(folder / "root.pem")}
    content: Json = (
        {"tls_certificate": {"certificate_chain": server, "private_key": server}}
        if name == "certificate"
        else {"validation_context": {"trusted_ca": root}}
    )
    kind = f"{T}envoy.extensions.transport_sockets.tls.v3.Secret"
    return {"name": name, "sds_config": from_file(folder, name, {"@type": kind, "name": name, **content})}


def _secret_chain(folder: Path, **validation: Any) -> Json:
    kind = f"{T}envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext"
    common = {"tls_certificate_sds_secret_configs": [_secret(folder, "certificate")], **validation}
    config = {"@type": kind, "common_tls_context": common, "require_client_certificate": True}
    return {"filter_chains": [chain(tcp("one"), transport_socket={"name": "tls", "typed_config": config})]}


def _combined(folder: Path) -> Json:
    names = {"match_typed_subject_alt_names": [{"san_type": "URI", "matcher": {"prefix": "spiffe://"}}]}
    return _secret_chain(
        folder,
        combined_validation_context={
            "default_validation_context": names,
            "validation_context_sds_secret_config": _secret(folder, "roots"),
        },
    )


_PRESENTED = tuple(presenting(name) for name in ("", "server"))
SCENARIOS |= {
    "validation by SDS": Scenario(
        lambda folder: _secret_chain(folder, validation_context_sds_secret_config=_secret(folder, "roots")),
        _PRESENTED,
    ),
    "combined_validation_context": Scenario(_combined, _PRESENTED),
}


_GUARD = "a tunnel may only name the pod that it was opened to (check_authority)"
#: Scenarios that end otherwise than in Envoy on purpose, and why.
DIFFERENT = {
    "use_http_header": _GUARD,
    "http_header_name": _GUARD,
    "named endpoint": "Envoy knows the field and does not obey it",
}
_EARLY = "Envoy chooses a cluster and dials while the client is still in its handshake or not yet allowed"
#: As ``scenarios.DIFFERENT_LOGS``.
DIFFERENT_LOGS = {
    "transport_socket_connect_timeout": _EARLY,
    "metadata": _EARLY,
    "validation by SDS": _EARLY,
    "combined_validation_context": _EARLY,
}
SUITE = Suite(SCENARIOS, bootstrap, applications, DIFFERENT_LOGS, DIFFERENT)
