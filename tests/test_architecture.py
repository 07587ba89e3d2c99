"""The arrows of ARCHITECTURE.md, held by reading every import. Changing a list here is a design decision."""

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARIES = ("hbone", "xds", "tproxy")
#: The imports among libraries that are allowed: the gRPC client uses the tunnels' TLS.
USES = {"xds": ("hbone",)}
APPLICATION = "ztunnel"

#: Imports that mean input or output, concurrency, or a clock.
IMPURE = {
    "asyncio",
    "socket",
    "select",
    "ssl",
    "threading",
    "subprocess",
    "time",
    "random",
    "os",
    "pyroute2",
    "grpc",
    "uvloop",
}

#: Modules of the application that decide and do nothing else.
PURE_APPLICATION = (
    "ztunnel/policy/engine.py",
    "ztunnel/policy/ledger.py",
    "ztunnel/ask/simulate/changes.py",
    "ztunnel/ask/simulate/policies.py",
    "ztunnel/ask/simulate/seen.py",
    "ztunnel/ask/simulate/suggest.py",
    "ztunnel/policy/authz/calls.py",
    "ztunnel/policy/calico/http_path.py",
    "ztunnel/policy/calico/ip_sets.py",
    "ztunnel/policy/calico/store.py",
    "ztunnel/policy/calico/verdict.py",
    "ztunnel/policy/calico/clauses.py",
    "ztunnel/policy/calico/evaluator.py",
    "ztunnel/policy/calico/guard.py",
    "ztunnel/policy/calico/explain.py",
    "ztunnel/policy/calico/report.py",
    "ztunnel/policy/calico/walk.py",
    "ztunnel/policy/calico/resources.py",
    "ztunnel/policy/calico/kubernetes.py",
    "ztunnel/policy/calico/cluster_policy.py",
    "ztunnel/policy/calico/read.py",
    "ztunnel/policy/calico/compile.py",
    "ztunnel/policy/calico/incremental.py",
    "ztunnel/kube/objects.py",
    "ztunnel/policy/netpol/explain.py",
    "ztunnel/policy/netpol/intervals.py",
    "ztunnel/policy/policysync/kinds.py",
    "ztunnel/policy/netpol/members.py",
    "ztunnel/policy/calico/objects.py",
    "ztunnel/policy/netpol/table_builder.py",
    "ztunnel/kube/kinds.py",
    "ztunnel/kube/errors.py",
    "ztunnel/policy/policysync/view.py",
    "ztunnel/policy/policysync/flows.py",
    "ztunnel/policy/policysync/explain.py",
    "ztunnel/proxy/istio/settings/app_probes.py",
    "ztunnel/addons/__init__.py",
    "ztunnel/proxy/addons/budget.py",
    "ztunnel/proxy/addons/decide.py",
    "ztunnel/proxy/addons/options.py",
    "ztunnel/proxy/addons/report.py",
    "ztunnel/proxy/addons/settings.py",
    "ztunnel/proxy/istio/path/addon_labels.py",
    "ztunnel/proxy/istio/path/route.py",
    "ztunnel/proxy/istio/path/explain.py",
    "ztunnel/policy/reasons.py",
    "ztunnel/ask/check/catalogue.py",
    "ztunnel/ask/check/rules/model.py",
    "ztunnel/ask/check/rules/objects.py",
    "ztunnel/ask/check/rules/access.py",
    "ztunnel/ask/check/rules/configuration.py",
    "ztunnel/ask/check/rules/identity.py",
    "ztunnel/ask/check/rules/kernel.py",
    "ztunnel/ask/check/rules/network.py",
    "ztunnel/ask/check/rules/operations.py",
    "ztunnel/ask/check/rules/policies.py",
    "ztunnel/ask/check/rules/workloads.py",
    "ztunnel/ask/flows/model.py",
    "ztunnel/ask/report/scrub.py",
    "ztunnel/ask/stat/traffic.py",
    "ztunnel/policy/effect.py",
    "ztunnel/ask/inspect/kinds.py",
    "ztunnel/runtime/console/jsonpath.py",
    "ztunnel/ask/inspect/envoy_tables.py",
    "ztunnel/ask/inspect/tables.py",
    "ztunnel/ask/inspect/outline.py",
    "ztunnel/ask/inspect/parts.py",
    "ztunnel/ask/inspect/saved.py",
    "ztunnel/ask/inspect/seen.py",
    "ztunnel/proxy/istio/path/balance.py",
    "ztunnel/proxy/istio/path/inbound_target.py",
    "ztunnel/proxy/istio/path/answered_keys.py",
    "ztunnel/proxy/istio/path/failed_endpoints.py",
    "ztunnel/proxy/istio/accounting/workload_labels.py",
    "ztunnel/proxy/istio/accounting/peer_baggage_labels.py",
    "ztunnel/proxy/istio/xds/mesh_dump.py",
    "ztunnel/proxy/istio/workers/messages.py",
    "ztunnel/proxy/istio/workers/mesh_replica.py",
    "ztunnel/proxy/dataplane/reasons.py",
    "ztunnel/proxy/dataplane/client_hello.py",
    "ztunnel/sidecar/capture_lists.py",
    "ztunnel/runtime/formats/config_reader.py",
    "ztunnel/runtime/formats/go_flags.py",
    "ztunnel/runtime/formats/go_values.py",
    "ztunnel/runtime/formats/go_yaml.py",
    "ztunnel/proxy/dataplane/proxy_protocol.py",
    "ztunnel/proxy/dataplane/agreement.py",
    "ztunnel/proxy/dataplane/attempts.py",
    "ztunnel/proxy/envoy/stream/stream_info.py",
    "ztunnel/proxy/envoy/stream/outcome.py",
    "ztunnel/proxy/envoy/secrets/verify.py",
    "ztunnel/proxy/identity/csr.py",
    "ztunnel/proxy/dataplane/life_table.py",
    "ztunnel/proxy/identity/peer.py",
    "ztunnel/proxy/identity/roots.py",
    "ztunnel/proxy/istio/certificates/schedule.py",
    "ztunnel/proxy/envoy/upstream/host.py",
    "ztunnel/proxy/envoy/upstream/priorities.py",
    "ztunnel/proxy/envoy/upstream/outlier.py",
    "ztunnel/proxy/envoy/stats/stats.py",
    "ztunnel/proxy/envoy/telemetry/access_log_filter.py",
    "ztunnel/control_plane/mesh.py",
    "ztunnel/control_plane/policies.py",
    "ztunnel/control_plane/generate.py",
    "ztunnel/control_plane/rbac.py",
    "ztunnel/control_plane/workloads.py",
    "ztunnel/control_plane/tokens.py",
    "ztunnel/control_plane/accounts.py",
    "ztunnel/sidecar/init/flags.py",
    "ztunnel/sidecar/inject/decision.py",
    "ztunnel/sidecar/inject/selector.py",
    "ztunnel/sidecar/inject/patch.py",
    "ztunnel/sidecar/inject/config.py",
    "ztunnel/sidecar/inject/option_annotations.py",
    "ztunnel/sidecar/inject/inject.py",
    "ztunnel/sidecar/inject/probes.py",
    "ztunnel/sidecar/inject/sidecar.py",
    "ztunnel/sidecar/inject/webhooks.py",
    "ztunnel/sidecar/inject/review.py",
    "ztunnel/sidecar/inject/manual.py",
    "ztunnel/sidecar/inject/bundle.py",
    "ztunnel/node/intercept/description.py",
    "ztunnel/proxy/istio/dns/answer.py",
    "ztunnel/proxy/istio/dns/message.py",
    "ztunnel/proxy/istio/zds/messages.py",
    "ztunnel/node/agent/audit.py",
    "ztunnel/node/agent/cgroup.py",
    "ztunnel/node/agent/comparison.py",
    "ztunnel/node/agent/description.py",
    "ztunnel/node/agent/enrolment.py",
    "ztunnel/node/agent/phase.py",
    "ztunnel/node/agent/errors.py",
    "ztunnel/runtime/backoff.py",
    "ztunnel/runtime/log_pressure.py",
    "ztunnel/proxy/dataplane/client_hello_arrival.py",
    "ztunnel/proxy/dataplane/names_answered.py",
    "ztunnel/proxy/tap/capture.py",
    "ztunnel/proxy/tap/pcapng.py",
    "ztunnel/proxy/tap/request.py",
    "ztunnel/proxy/tap/stream.py",
    "ztunnel/proxy/flows/filters.py",
    "ztunnel/proxy/flows/history.py",
    "ztunnel/proxy/flows/hubble.py",
    "ztunnel/proxy/flows/settings.py",
    "ztunnel/proxy/flows/times.py",
    "ztunnel/proxy/ui/seen.py",
    "ztunnel/proxy/ui/setting.py",
    "ztunnel/proxy/ui/view.py",
    "ztunnel/proxy/istio/zds/reconcile.py",
)

#: Pure but for one import, each with its reason.
ALLOWED = {
    "xds/proto/generate.py": {"subprocess", "os"},  # a tool of developers, no part of the library
    "hbone/tls_identities.py": {"os"},  # memory as a file, for a call of OpenSSL that takes files only
    "tproxy/errors.py": {"os"},  # strerror: a number to its words
}


@cache
def modules(*folders: str) -> tuple[Path, ...]:
    return tuple(sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")))


@cache
def imports(path: Path, *, typing_only: bool = False) -> tuple[str, ...]:
    """Return every module that a file imports, dotted.

    Args:
        typing_only: those below ``TYPE_CHECKING``, too, and modules of packages one by one.
    """
    return tuple(_imports(path, typing_only))


@cache
def parsed(path: Path) -> ast.Module:
    gc.disable()  # or it walks the trees again and again while they grow: half of the time
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _trees_are_freed() -> Iterator[None]:
    """Free the trees of a thousand files, or each later collection of this process walks them."""
    yield
    parsed.cache_clear()


def _imports(path: Path, typing_only: bool) -> Iterator[str]:
    for node in _statements(parsed(path), typing_only=typing_only):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            members = [f"{module}.{alias.name}" for alias in node.names] if typing_only else []
            found = [name for name in members if _is_module(name)]
            yield from found
            if len(found) < len(node.names):
                yield module


@cache
def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def _module_name(path: Path) -> str:
    return relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


#: The fields of statements that hold statements, handlers or cases. Expressions, most of a tree, are skipped.
_BODIES = {"body", "handlers", "orelse", "finalbody", "cases"}


def _statements(tree: ast.AST, *, typing_only: bool) -> Iterator[ast.AST]:
    """Yield every statement, those below ``TYPE_CHECKING`` only with ``typing_only``. No expression imports."""
    left = [tree]
    while left:
        node = left.pop()
        for name in (each for each in node._fields if each in _BODIES):
            for child in getattr(node, name):
                if not typing_only and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                    continue
                yield child
                left.append(child)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


#: Folders of the repository. A new one is a design decision.
TOP_LEVEL = {
    "ztunnel",
    "hbone",
    "xds",
    "tproxy",
    "tests",
    "bench",
    "deploy",
    "docs",
    "examples",
    "requirements",
    ".ci",
}

#: The packages of the application that each part can import. Commands are above the front ends, and these are
#: above the shared parts. The two front ends never import each other.
SHARED = {
    "addons",
    "runtime",
    "policy",
    "policy/calico",
    "proxy/addons",
    "proxy/dataplane",
    "proxy/flows",
    "proxy/identity",
    "proxy/otlp",
    "proxy/tap",
    "proxy/ui",
}
LAYERS = {
    "runtime": set(),
    "kube": {"runtime"},
    "policy": {"runtime"},
    "policy/calico": {"runtime", "policy", "kube"},
    "policy/authz": {"runtime", "policy", "policy/calico"},
    "policy/policysync": {"runtime", "policy/calico", "kube"},
    "policy/netpol": {"runtime", "policy/calico", "policy/policysync", "kube"},
    "addons": set(),
    "addons/testing": {"addons", "proxy/addons"},
    "proxy": set(),
    "proxy/addons": {"addons", "runtime", "proxy/dataplane"},
    "proxy/identity": {"runtime"},
    "proxy/dataplane": {"runtime", "proxy/identity", "policy"},
    "proxy/flows": {"runtime", "proxy/dataplane"},
    "proxy/otlp": {"runtime"},
    "proxy/tap": {"runtime"},
    "proxy/ui": {"runtime"},
    "proxy/istio": SHARED,
    "proxy/envoy": SHARED,
    "node": set(),
    "node/agent": {"runtime", "kube", "proxy/istio"},
    "node/intercept": {"runtime"},
    "sidecar": {"runtime"},
    "sidecar/init": {"runtime", "sidecar"},
    "sidecar/inject": {"runtime", "kube", "sidecar"},
    "control_plane": {"runtime", "kube", "policy/calico", "policy/policysync", "proxy/identity"},
    "ask": set(),
    "ask/addons": {"runtime", "addons", "addons/testing", "proxy/addons", "ask/inspect"},
    "ask/inspect": {"runtime", "policy", "proxy/istio", "proxy/envoy", "proxy/dataplane", "proxy/tap"},
    "ask/check": {"runtime", "kube", "policy", "ask/inspect"},
    "ask/report": {"runtime", "kube", "ask/check", "ask/inspect"},
    "ask/flows": {"runtime", "ask/inspect"},
    "ask/stat": {"runtime", "ask/inspect"},
    "ask/simulate": {"runtime", "policy", "proxy/istio", "ask/inspect", "addons", "proxy/addons"},
    "cli": {
        "runtime",
        "ask/addons",
        "ask/check",
        "ask/inspect",
        "ask/flows",
        "ask/report",
        "ask/stat",
        "ask/simulate",
        "control_plane",
        "node/agent",
        "node/intercept",
        "policy/authz",
        "policy/netpol",
        "policy/policysync",
        "proxy/addons",
        "proxy/envoy",
        "proxy/istio",
        "sidecar/init",
        "sidecar/inject",
    },
    "__main__": {"cli"},
    "earlier_names": set(),
}


def part_of(module: str) -> str:
    """Return the part of the application that a dotted module below it belongs to; empty for its version."""
    names = module.split(".")[1:]
    return next((part for n in (2, 1) if (part := "/".join(names[:n])) in LAYERS), "")


def test_the_folders_are_known() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert {line.partition("/")[0] for line in tracked.splitlines() if "/" in line} == TOP_LEVEL


@pytest.mark.parametrize("part", LAYERS)
def test_arrows_point_down_inside_the_application(part: str) -> None:
    files = [path for path in modules(APPLICATION) if part_of(_module_name(path)) == part]
    assert files
    wrong = [
        f"{relative(path)} imports {name}"
        for path in files
        for name in imports(path, typing_only=True)
        if name.startswith(f"{APPLICATION}.") and part_of(name) not in {part, *LAYERS[part]}
    ]
    assert wrong == []


def test_every_module_of_the_application_has_a_layer() -> None:
    without = [name for path in modules(APPLICATION) if not part_of(name := _module_name(path))]
    assert without == [APPLICATION]


def test_there_is_no_import_circle_of_folders() -> None:
    """A folder stands for the modules directly in it, not for those in its subfolders."""
    files = {
        _module_name(path): path for path in modules(*LIBRARIES, APPLICATION) if not path.stem.endswith("_pb2")
    }
    del files[APPLICATION]  # holds the version, and installs earlier names
    arrows: dict[Path, set[Path]] = {}
    for path in files.values():
        named = {files[name].parent for name in imports(path, typing_only=True) if name in files}
        arrows.setdefault(path.parent, set()).update(named - {path.parent})
    assert len(arrows) > 50
    TopologicalSorter(arrows).prepare()  # raises CycleError, which names the circle


def test_there_is_no_import_circle_of_modules() -> None:
    """Imports for type checkers count, since their reader needs both. A Protocol or a value parts a circle."""
    files = {
        _module_name(path): path for path in modules(*LIBRARIES, APPLICATION) if not path.stem.endswith("_pb2")
    }
    arrows = {
        module: {name for name in imports(path, typing_only=True) if name in files} - {module}
        for module, path in files.items()
    }
    assert arrows["hbone.aio.server"] >= {"hbone.aio.connection", "hbone.aio.requests"}
    TopologicalSorter(arrows).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("library", LIBRARIES)
def test_libraries_know_neither_each_other_nor_the_application(library: str) -> None:
    foreign = {APPLICATION, "deploy", "bench", "tests", *LIBRARIES} - {library, *USES.get(library, ())}
    wrong = [
        f"{relative(path)} imports {name}"
        for path in modules(library)
        for name in imports(path)
        if name.partition(".")[0] in foreign
    ]
    assert wrong == []


def test_libraries_use_each_other_where_it_is_written() -> None:
    """xds may import only the TLS modules of hbone, not tunnels, and only in its gRPC client."""
    used = {
        (relative(path), name) for path in modules("xds") for name in imports(path) if name.startswith("hbone")
    }
    assert {name for _, name in used} == {"hbone.errors", "hbone.settings", "hbone.tls", "hbone.tls_context"}
    assert {path for path, _ in used} == {"xds/aio/channel.py", "xds/aio/tls.py", "xds/grpc/tls.py"}


def test_grpc_is_on_one_library_at_each_end() -> None:
    """The client, which every node has, uses h2. Servers use grpcio, which a proxy imports only if it serves."""
    users: dict[str, set[str]] = {"h2": set(), "grpc": set()}
    for path in modules(*LIBRARIES, APPLICATION):
        for name in imports(path):
            users.get(name.partition(".")[0], set()).add(relative(path))
    assert users == {
        "h2": {"xds/grpc/connection.py", "xds/grpc/status.py"},
        "grpc": {
            "xds/aio/grpc_server.py",
            "xds/aio/server.py",
            "ztunnel/control_plane/server.py",
            "ztunnel/proxy/flows/observer.py",
        },
    }


def test_the_client_of_api_servers_is_seen_by_two_modules() -> None:
    """Readers of objects use the interface. The library behind it takes 10 MiB that no proxy needs."""
    users = {
        relative(path)
        for path in modules(*LIBRARIES, APPLICATION)
        for name in imports(path)
        if name.partition(".")[0] in ("lightkube", "httpx2")
    }
    assert users == {"ztunnel/kube/client.py", "ztunnel/kube/kubeconfig.py"}
    readers = ("runtime", "proxy", "policy/calico")
    wrong = [
        f"{relative(path)} imports {name}"
        for part in readers
        for path in modules(f"{APPLICATION}/{part}")
        for name in imports(path)
        if name.startswith("ztunnel.kube") and name not in ("ztunnel.kube.objects", "ztunnel.kube.files")
    ]
    assert wrong == []


def test_nothing_that_ships_imports_tests_or_benches() -> None:
    wrong = [
        f"{relative(path)} imports {name}"
        for path in modules(*LIBRARIES, APPLICATION)
        for name in imports(path)
        if name.partition(".")[0] in ("tests", "bench", "deploy")
    ]
    assert wrong == []


def pure_modules() -> list[Path]:
    libraries = [
        path for path in modules(*LIBRARIES) if "aio" not in path.parts and not path.stem.endswith("_pb2")
    ]
    return libraries + [ROOT / name for name in PURE_APPLICATION]


@pytest.mark.parametrize("path", pure_modules(), ids=relative)
def test_pure_modules_do_no_input_or_output(path: Path) -> None:
    impure = {name.partition(".")[0] for name in imports(path)} & IMPURE
    assert impure <= ALLOWED.get(relative(path), set())


def test_the_model_knows_no_protobuf() -> None:
    wrong = [
        f"{relative(path)} imports {name}"
        for path in modules("xds/model")
        for name in imports(path)
        if name.startswith(("google", "xds.proto", "xds.dialects", "xds.protocol", "xds.aio"))
    ]
    assert wrong == []


_READ = re.compile(r"\.(\w+)\b|\"(\w+)\"")


def test_every_field_of_the_model_has_a_reader() -> None:
    """A field that is compiled and read by nobody would be configuration that is accepted and ignored."""
    files = modules("xds/model", "hbone", "tproxy", "ztunnel")
    read = {name for path in files for found in _READ.findall(path.read_text()) for name in found}
    unread = set()
    for path in modules("xds/model"):
        for definition in parsed(path).body:
            for field in definition.body if isinstance(definition, ast.ClassDef) else ():
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    name = field.target.id
                    if name not in read:
                        unread.add(f"{definition.name}.{name}")
    assert unread == set()


_LOGGED = {"info", "warning", "error", "critical"}


def _prints_an_error_of_the_system(handler: ast.ExceptHandler) -> Iterator[int]:
    """Yield the lines of a handler that log an OSError unchanged, which prints ``[Errno 2]``."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    if not any(isinstance(kind, ast.Name) and kind.id in ("OSError", "ConnectionError") for kind in kinds):
        return
    for call in (node for statement in handler.body for node in ast.walk(statement) if isinstance(node, ast.Call)):
        logs = isinstance(call.func, ast.Attribute) and call.func.attr in _LOGGED
        if logs and any(isinstance(each, ast.Name) and each.id == handler.name for each in call.args):
            yield call.lineno


def test_the_log_has_words_for_errors_of_the_system() -> None:
    """See ``plain_reason``; a library takes ``strerror``."""
    found = [
        f"{relative(path)}:{line}"
        for path in modules("hbone", "tproxy", "xds", "ztunnel")
        for handler in _statements(parsed(path), typing_only=True)
        if isinstance(handler, ast.ExceptHandler)
        for line in _prints_an_error_of_the_system(handler)
    ]
    assert found == []


def test_no_task_waits_by_a_function_that_can_lose_its_cancellation() -> None:
    """Before Python 3.12, ``asyncio.wait_for`` drops a cancellation that arrives just after its result.

    The task then continues, and its owner waits for its end for ever.
    """
    found = [
        f"{relative(path)}:{node.lineno}: use asyncio.timeout"
        for path in modules("hbone", "tproxy", "xds", "ztunnel")
        if "asyncio.wait_for(" in path.read_text()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "asyncio.wait_for"
    ]
    assert found == []


def test_wire_messages_are_seen_by_dialects_and_shells_only() -> None:
    """The data path and everything it calls per connection reads the model, never a message."""
    readers = (
        "path/datapath",
        "path/terminate",
        "path/internal",
        "listeners/chains",
        "listeners/connections",
        "stream/outcome",
        "listeners/filters",
        "stream/stream_info",
    )
    wrong = [
        f"ztunnel/proxy/envoy/{reader}.py imports {name}"
        for reader in readers
        for name in imports(ROOT / f"ztunnel/proxy/envoy/{reader}.py")
        if name.startswith(("google", "xds.proto"))
    ]
    assert wrong == []


@cache
def loaded_with(module: str) -> frozenset[str]:
    """Return the names of all modules in a new process that has imported the command line and a module."""
    program = f"import sys, ztunnel.cli, {module}; print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    return frozenset(printed.stdout.split())


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        (
            "ztunnel.proxy.istio.workers.worker",
            {"h2", "grpc", "google.protobuf", "yaml", "prometheus_client", "h11"},
        ),
        (
            "ztunnel.proxy.istio.app",
            {"yaml", "prometheus_client", "grpc", "lightkube", "httpx2", "uvicorn", "rich"},
        ),
        (
            "ztunnel.proxy.envoy.app",
            {"yaml", "prometheus_client", "grpc", "lightkube", "httpx2", "uvicorn", "rich"},
        ),
    ],
)
def test_a_process_imports_only_what_it_runs(module: str, heavy: set[str]) -> None:
    """Every node has these processes. Modules that few of them need are imported on first use."""
    loaded = loaded_with(module)
    assert module in loaded
    assert not heavy & loaded


@pytest.mark.parametrize(
    ("line", "heavy"),
    [
        ("gate --timeout=0.01", {"hbone", "cryptography", "pyroute2", "h2", "grpc", "yaml", "google.protobuf"}),
        ("drain --port=1", {"hbone", "cryptography", "pyroute2", "h2", "grpc", "yaml", "google.protobuf"}),
        ("status --file=/dev/null", {"hbone", "cryptography", "pyroute2", "h2", "grpc", "yaml", "rich"}),
        ("policy check /dev/null", {"hbone", "cryptography", "pyroute2", "h2", "grpc"}),
        ("init --print", {"hbone", "cryptography", "h2", "grpc", "yaml", "google.protobuf"}),
    ],
)
def test_a_command_imports_no_other(line: str, heavy: set[str]) -> None:
    program = f"import sys; from ztunnel.cli import main; main({line.split()}); print(); print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    loaded = set(printed.stdout.splitlines()[-1].split())
    assert "ztunnel.cli" in loaded
    assert not heavy & loaded


@pytest.mark.parametrize(
    ("module", "others"),
    [
        # In an Istio mesh only Envoy's messages of discovery are needed, and the messages in them.
        ("ztunnel.proxy.istio.app", ("ztunnel.proxy.envoy", "xds.dialects.envoy", "xds.proto.envoy.extensions")),
        ("ztunnel.proxy.istio.workers.worker", ("ztunnel.proxy.envoy", "xds.dialects.envoy", "xds.proto")),
        ("ztunnel.proxy.envoy.app", ("ztunnel.proxy.istio", "xds.dialects.istio")),
    ],
)
def test_a_proxy_imports_nothing_of_the_other_dialect(module: str, others: tuple[str, ...]) -> None:
    loaded = loaded_with(module)
    assert module in loaded
    assert [name for name in loaded if name.startswith(others)] == []


@pytest.mark.parametrize("module", ["ztunnel.proxy.istio.app", "ztunnel.proxy.envoy.app"])
def test_a_proxy_loads_one_openssl(module: str) -> None:
    program = (
        f"import sys; from ztunnel.cli import leave_out; leave_out(); import hashlib, {module}, "
        "ztunnel.runtime.http.exposition; "
        "print(*sys.modules); print(hashlib.sha256(b'').hexdigest()[:8], open('/proc/self/maps').read())"
    )
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    loaded, rest = printed.stdout.split("\n", 1)
    unused = {"ssl", "_ssl", "_hashlib", "google.protobuf.text_format", "http.server", "urllib.request"}
    assert {module, "uvloop"} <= set(loaded.split())
    assert not unused & set(loaded.split())
    assert rest.startswith("e3b0c442 ")
    assert "libssl" not in rest


def test_ssl_can_be_imported_where_asyncio_has_none() -> None:
    program = (
        "from ztunnel.runtime.unused_imports import leave_out; leave_out(); import asyncio, uvloop, ssl\n"
        "assert ssl.create_default_context().check_hostname\n"
        "uvloop.run(asyncio.open_connection('127.0.0.1', 1, ssl=True))"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False, capture_output=True, text=True)
    assert run.stderr.strip().endswith("this process leaves out create_default_context; for TLS use hbone.tls")


def test_the_names_of_pods_need_no_library_that_takes_long_to_import() -> None:
    program = "import sys, ztunnel.proxy.istio.app, ztunnel.proxy.istio.dns.pod_dns; print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert [name for name in printed.stdout.split() if name.split(".")[0] in ("dns", "idna", "zipfile")] == []


def test_the_imports_are_found() -> None:
    assert len(pure_modules()) > 60
    assert "asyncio" in set(imports(ROOT / "ztunnel/proxy/envoy/path/datapath.py"))
