"""The arrows of ARCHITECTURE.md, held by reading every import. Changing a list here is a design decision."""

import ast
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
#: What a library may import of the others: the gRPC client takes the tunnels' TLS.
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
    "ztunnel/simulate/changes.py",
    "ztunnel/simulate/policies.py",
    "ztunnel/simulate/seen.py",
    "ztunnel/simulate/suggest.py",
    "ztunnel/authz/calls.py",
    "ztunnel/calico/http_path.py",
    "ztunnel/calico/ip_sets.py",
    "ztunnel/calico/store.py",
    "ztunnel/calico/verdict.py",
    "ztunnel/calico/clauses.py",
    "ztunnel/calico/evaluator.py",
    "ztunnel/calico/guard.py",
    "ztunnel/calico/explain.py",
    "ztunnel/calico/report.py",
    "ztunnel/calico/walk.py",
    "ztunnel/calico/resources.py",
    "ztunnel/calico/kubernetes.py",
    "ztunnel/calico/cluster_policy.py",
    "ztunnel/calico/read.py",
    "ztunnel/calico/compile.py",
    "ztunnel/calico/incremental.py",
    "ztunnel/kube/objects.py",
    "ztunnel/netpol/explain.py",
    "ztunnel/netpol/intervals.py",
    "ztunnel/policysync/kinds.py",
    "ztunnel/netpol/members.py",
    "ztunnel/calico/objects.py",
    "ztunnel/netpol/table.py",
    "ztunnel/kube/kinds.py",
    "ztunnel/kube/errors.py",
    "ztunnel/policysync/view.py",
    "ztunnel/policysync/flows.py",
    "ztunnel/policysync/explain.py",
    "ztunnel/istio/app_probes.py",
    "ztunnel/istio/route.py",
    "ztunnel/istio/explain.py",
    "ztunnel/policy/reasons.py",
    "ztunnel/inspect/envoy_tables.py",
    "ztunnel/inspect/tables.py",
    "ztunnel/inspect/outline.py",
    "ztunnel/inspect/parts.py",
    "ztunnel/inspect/saved.py",
    "ztunnel/inspect/seen.py",
    "ztunnel/istio/balance.py",
    "ztunnel/istio/inbound_target.py",
    "ztunnel/istio/failed_endpoints.py",
    "ztunnel/istio/workload_labels.py",
    "ztunnel/istio/baggage_labels.py",
    "ztunnel/istio/admin/mesh_dump.py",
    "ztunnel/istio/workers/messages.py",
    "ztunnel/istio/workers/mesh_replica.py",
    "ztunnel/envoy/listeners/client_hello.py",
    "ztunnel/runtime/capture_lists.py",
    "ztunnel/runtime/config_reader.py",
    "ztunnel/runtime/go_flags.py",
    "ztunnel/runtime/go_values.py",
    "ztunnel/runtime/go_yaml.py",
    "ztunnel/dataplane/proxy_protocol.py",
    "ztunnel/dataplane/agreement.py",
    "ztunnel/dataplane/attempts.py",
    "ztunnel/envoy/stream_info.py",
    "ztunnel/envoy/outcome.py",
    "ztunnel/envoy/secrets/verify.py",
    "ztunnel/identity/csr.py",
    "ztunnel/dataplane/life.py",
    "ztunnel/identity/peer.py",
    "ztunnel/identity/roots.py",
    "ztunnel/istio/certificates/schedule.py",
    "ztunnel/envoy/upstream/host.py",
    "ztunnel/envoy/upstream/priorities.py",
    "ztunnel/envoy/upstream/outlier.py",
    "ztunnel/envoy/telemetry/stats.py",
    "ztunnel/envoy/telemetry/access_log_filter.py",
    "ztunnel/control_plane/mesh.py",
    "ztunnel/control_plane/policies.py",
    "ztunnel/control_plane/generate.py",
    "ztunnel/control_plane/rbac.py",
    "ztunnel/control_plane/workloads.py",
    "ztunnel/control_plane/tokens.py",
    "ztunnel/control_plane/accounts.py",
    "ztunnel/init/flags.py",
    "ztunnel/inject/decision.py",
    "ztunnel/inject/selector.py",
    "ztunnel/inject/patch.py",
    "ztunnel/inject/config.py",
    "ztunnel/inject/annotations.py",
    "ztunnel/inject/inject.py",
    "ztunnel/inject/probes.py",
    "ztunnel/inject/sidecar.py",
    "ztunnel/inject/webhooks.py",
    "ztunnel/inject/review.py",
    "ztunnel/inject/manual.py",
    "ztunnel/inject/bundle.py",
    "ztunnel/intercept/description.py",
    "ztunnel/istio/dns/answer.py",
    "ztunnel/istio/dns/message.py",
    "ztunnel/istio/zds/messages.py",
    "ztunnel/agent/audit.py",
    "ztunnel/agent/cgroup.py",
    "ztunnel/agent/comparison.py",
    "ztunnel/agent/description.py",
    "ztunnel/agent/enrolment.py",
    "ztunnel/agent/phase.py",
    "ztunnel/agent/errors.py",
    "ztunnel/runtime/backoff.py",
    "ztunnel/runtime/log_pressure.py",
    "ztunnel/runtime/client_hello.py",
    "ztunnel/limits/table.py",
    "ztunnel/tap/capture.py",
    "ztunnel/tap/pcapng.py",
    "ztunnel/tap/request.py",
    "ztunnel/tap/stream.py",
    "ztunnel/ui/seen.py",
    "ztunnel/ui/setting.py",
    "ztunnel/ui/view.py",
    "ztunnel/istio/zds/reconcile.py",
)

#: Pure but for one import, each with its reason.
ALLOWED = {
    "xds/proto/generate.py": {"subprocess", "os"},  # a tool of developers, no part of the library
    "hbone/tls_identities.py": {"os"},  # memory as a file, for a call of OpenSSL that takes files only
    "tproxy/errors.py": {"os"},  # strerror: a number to its words
}


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def imports(path: Path, *, typing_only: bool = False) -> tuple[str, ...]:
    """Return every module that a file imports, dotted.

    Args:
        typing_only: those below ``TYPE_CHECKING``, too, and modules of packages one by one.
    """
    return tuple(_imports(path, typing_only))


def _imports(path: Path, typing_only: bool) -> Iterator[str]:
    for node in _nodes(ast.parse(path.read_text()), typing_only=typing_only):
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


def _nodes(tree: ast.AST, *, typing_only: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if not typing_only and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _nodes(child, typing_only=typing_only)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


#: Folders of the repository; another one is a design decision.
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

#: What each part of the application may import of the others. Commands stand above the front ends, these above
#: what they share; the two front ends never meet.
SHARED = {"runtime", "http", "identity", "policy", "calico", "dataplane", "otlp", "tap", "ui"}
LAYERS = {
    "runtime": set(),
    "http": {"runtime"},
    "identity": {"runtime"},
    "policy": {"runtime"},
    "calico": {"runtime", "policy", "kube"},
    "kube": {"runtime"},
    "dataplane": {"runtime", "identity", "policy"},
    "istio": SHARED,
    "envoy": SHARED,
    "agent": {"runtime", "http", "istio", "kube"},
    "control_plane": {"runtime", "identity", "kube", "calico", "policysync"},
    "init": {"runtime"},
    "inject": {"runtime", "kube"},
    "inspect": {"runtime", "istio", "envoy", "tap"},
    "intercept": {"runtime"},
    "authz": {"runtime", "http", "calico"},
    "policysync": {"runtime", "http", "calico", "kube"},
    "limits": {"runtime", "http", "istio", "calico", "otlp", "policy"},
    "netpol": {"runtime", "http", "calico", "kube", "policysync"},
    "otlp": {"runtime", "http"},
    "simulate": {"runtime", "istio", "policy", "inspect"},
    "tap": {"runtime", "http"},
    "ui": {"runtime", "http"},
    "cli": {
        "runtime",
        "istio",
        "envoy",
        "agent",
        "authz",
        "policysync",
        "control_plane",
        "init",
        "inject",
        "inspect",
        "intercept",
        "limits",
        "netpol",
        "simulate",
    },
    "__main__": {"cli"},
}


def test_the_folders_are_known() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert {line.partition("/")[0] for line in tracked.splitlines() if "/" in line} == TOP_LEVEL


@pytest.mark.parametrize("part", LAYERS)
def test_arrows_point_down_inside_the_application(part: str) -> None:
    files = (
        [ROOT / APPLICATION / f"{part}.py"] if part in ("cli", "__main__") else modules(f"{APPLICATION}/{part}")
    )
    assert files
    wrong = [
        f"{relative(path)} imports {name}"
        for path in files
        for name in imports(path, typing_only=True)
        if name.startswith(f"{APPLICATION}.") and name.split(".")[1] not in {part, *LAYERS[part]}
    ]
    assert wrong == []


def test_every_part_of_the_application_has_a_layer() -> None:
    parts = {path.relative_to(ROOT / APPLICATION).parts[0] for path in modules(APPLICATION)}
    assert {part.removesuffix(".py") for part in parts} - {"__init__"} == set(LAYERS)


def test_no_module_imports_itself_by_a_detour() -> None:
    """Imports for type checkers count, since their reader needs both. A Protocol or a value parts a circle."""
    files = {
        _module_name(path): path for path in modules(*LIBRARIES, APPLICATION) if not path.stem.endswith("_pb2")
    }
    arrows = {
        module: {name for name in imports(path, typing_only=True) if name in files} - {module}
        for module, path in files.items()
    }
    assert arrows["hbone.aio.server"] >= {"hbone.aio.connection", "hbone.aio.tunnel"}
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
    """Of hbone, xds needs TLS and nothing of tunnels, and that in its gRPC client only."""
    used = {
        (relative(path), name) for path in modules("xds") for name in imports(path) if name.startswith("hbone")
    }
    assert {name for _, name in used} == {"hbone.errors", "hbone.settings", "hbone.tls", "hbone.tls_context"}
    assert {path for path, _ in used} == {"xds/aio/channel.py", "xds/aio/tls.py", "xds/grpc/tls.py"}


def test_grpc_is_on_one_library_at_each_end() -> None:
    """h2 in the client that every node has; grpcio in servers, which no proxy imports."""
    users: dict[str, set[str]] = {"h2": set(), "grpc": set()}
    for path in modules(*LIBRARIES, APPLICATION):
        for name in imports(path):
            users.get(name.partition(".")[0], set()).add(relative(path))
    assert users == {
        "h2": {"xds/grpc/connection.py", "xds/grpc/status.py"},
        "grpc": {"xds/aio/grpc_server.py", "xds/aio/server.py", "ztunnel/control_plane/server.py"},
    }


def test_the_client_of_api_servers_is_seen_by_one_module() -> None:
    """Readers of objects know the seam; the library behind it is 10 MiB that no proxy needs."""
    users = {
        relative(path)
        for path in modules(*LIBRARIES, APPLICATION)
        for name in imports(path)
        if name.partition(".")[0] in ("lightkube", "httpx2")
    }
    assert users == {"ztunnel/kube/client.py"}
    readers = ("runtime", "istio", "envoy", "dataplane", "identity", "policy", "http", "calico")
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


def test_what_the_model_says_is_obeyed() -> None:
    """A field that is compiled and read by nobody would be configuration that is accepted and ignored."""
    files = modules("xds/model", "hbone", "tproxy", "ztunnel")
    read = {name for path in files for found in _READ.findall(path.read_text()) for name in found}
    unread = set()
    for path in modules("xds/model"):
        for definition in ast.parse(path.read_text()).body:
            for field in definition.body if isinstance(definition, ast.ClassDef) else ():
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    name = field.target.id
                    if name not in read:
                        unread.add(f"{definition.name}.{name}")
    assert unread == set()


_LOGGED = {"info", "warning", "error", "critical"}


def _prints_an_error_of_the_system(handler: ast.ExceptHandler) -> Iterator[int]:
    """Yield the lines of a handler at which an OSError is logged as it is, which shows ``[Errno 2]``."""
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
        for handler in ast.walk(ast.parse(path.read_text()))
        if isinstance(handler, ast.ExceptHandler)
        for line in _prints_an_error_of_the_system(handler)
    ]
    assert found == []


def test_wire_messages_are_seen_by_dialects_and_shells_only() -> None:
    """The data path and everything it calls per connection reads the model, never a message."""
    readers = (
        "datapath",
        "terminate",
        "internal",
        "listeners/chains",
        "connections",
        "outcome",
        "listeners/filters",
        "stream_info",
    )
    wrong = [
        f"ztunnel/envoy/{reader}.py imports {name}"
        for reader in readers
        for name in imports(ROOT / f"ztunnel/envoy/{reader}.py")
        if name.startswith(("google", "xds.proto"))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("ztunnel.istio.workers.worker", {"h2", "grpc", "google.protobuf", "yaml", "prometheus_client", "h11"}),
        ("ztunnel.istio.app", {"yaml", "prometheus_client", "grpc", "lightkube", "httpx2", "uvicorn", "rich"}),
        ("ztunnel.envoy.app", {"yaml", "prometheus_client", "grpc", "lightkube", "httpx2", "uvicorn", "rich"}),
    ],
)
def test_a_process_imports_only_what_it_runs(module: str, heavy: set[str]) -> None:
    """Every node has these processes; what few of them need is imported when it is."""
    program = f"import sys, {module}; print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    loaded = set(printed.stdout.split())
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
        # Of Envoy's messages an Istio mesh uses those of discovery, and what they are made of.
        ("ztunnel.istio.app", ("ztunnel.envoy", "xds.dialects.envoy", "xds.proto.envoy.extensions")),
        ("ztunnel.istio.workers.worker", ("ztunnel.envoy", "xds.dialects.envoy", "xds.proto")),
        ("ztunnel.envoy.app", ("ztunnel.istio", "xds.dialects.istio")),
    ],
)
def test_a_proxy_imports_nothing_of_the_other_dialect(module: str, others: tuple[str, ...]) -> None:
    program = f"import sys, ztunnel.cli, {module}; print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    loaded = printed.stdout.split()
    assert module in loaded
    assert [name for name in loaded if name.startswith(others)] == []


def test_the_names_of_pods_need_no_library_that_takes_long_to_import() -> None:
    program = "import sys, ztunnel.istio.app, ztunnel.istio.dns.pod_dns; print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert [name for name in printed.stdout.split() if name.split(".")[0] in ("dns", "idna", "zipfile")] == []


def test_there_is_something_to_check() -> None:
    assert len(pure_modules()) > 60
    assert "asyncio" in set(imports(ROOT / "ztunnel/envoy/datapath.py"))
