"""Installs the distribution with others that have its import names or its messages, in one environment of pip.

``xds-protos`` has a top-level package ``xds``, too: each installation replaces the other's ``xds/__init__.py``,
and removing one deletes it. In every such state both must import in either order, and our command must work.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from deploy.wheels import build
from tests.generated import every_example

ROOT = Path(__file__).parents[2]
WAIT_S = 600
OURS = "from xds.proto import registry; import ztunnel.proxy.envoy.app, ztunnel.proxy.istio.app, hbone, tproxy"
THEIRS = """
from google.rpc import error_details_pb2, status_pb2
from envoy.service.discovery.v3 import ads_pb2, ads_pb2_grpc, discovery_pb2
from envoy.config.listener.v3 import listener_pb2
from xds.core.v3 import resource_locator_pb2
from xds.type.matcher.v3 import matcher_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
import grpc_admin, grpc_channelz.v1.channelz, grpc_csds, grpc_health.v1.health, grpc_reflection.v1alpha.reflection
import grpc_status.rpc_status
"""
BOTH = """
ours = registry.message_for("envoy.config.listener.v3.Listener")
theirs = listener_pb2.Listener
assert ours is not theirs and ours.DESCRIPTOR.full_name == theirs.DESCRIPTOR.full_name
assert ours.FromString(theirs(name="l").SerializeToString()).name == "l"
assert registry.message_for("xds.type.matcher.v3.Matcher") is not matcher_pb2.Matcher
import grpc
from concurrent import futures
server = grpc.server(futures.ThreadPoolExecutor(1))
grpc_admin.add_admin_servicers(server)
grpc_reflection.v1alpha.reflection.enable_server_reflection(["x"], server)
"""
#: Messages of pip without a package index.
_UNREACHABLE = ("Failed to establish a new connection", "Name or service not known", "Temporary failure in name",
                "Connection refused", "timed out", "No matching distribution found")  # fmt: skip


class Environment:
    """A virtual environment in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=WAIT_S)

    def pip(self, *arguments: str | Path) -> None:
        """Run pip; a test is skipped where no package index can be reached."""
        inside = self._folder / "bin/python"
        command = [sys.executable, "-m", "pip", "--python", inside, "-q", "--disable-pip-version-check"]
        command += ["--retries", "1"]
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=WAIT_S, env=self._environment()
        )
        if done.returncode and any(words in done.stderr for words in _UNREACHABLE):
            pytest.skip("NOT TESTED: no package index can be reached: " + done.stderr.strip().splitlines()[-1])
        assert done.returncode == 0, done.stderr

    def run(self, program: str) -> None:
        """Run a program text in another folder than the project's."""
        self._run([self._folder / "bin/python", "-c", program])

    def command(self, *arguments: str | Path) -> None:
        """Run the installed ``ztunnel``."""
        self._run([self._folder / "bin/ztunnel", *arguments])

    def _run(self, command: Sequence[str | Path]) -> None:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=WAIT_S, cwd=self._folder, env=self._environment()
        )
        assert done.returncode == 0, done.stderr

    def _environment(self) -> dict[str, str]:
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        return {name: value for name, value in os.environ.items() if name not in hidden}


@pytest.fixture(scope="module", autouse=True)
def pip_compiles_nothing() -> Iterator[None]:
    """Stop pip from compiling, which takes half of an installation's time. Imports compile the needed modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_COMPILE", "0")  # the value of --compile: pip's variables of negative flags are so
        yield


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment that has the locked packages which this project needs."""
    made = Environment(tmp_path_factory.mktemp("beside") / "venv")
    made.pip("install", "--require-hashes", "-r", ROOT / "requirements/runtime.lock")
    return made


@pytest.fixture(scope="module")
def wheel(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of ``pip install .``; after ``environment``, which skips where nothing can be fetched."""
    del environment
    folder = tmp_path_factory.mktemp("wheel")
    return build(sys.executable, folder, compiled=False)


def works(environment: Environment, *, beside: bool) -> None:
    """Check our command, and both in one process if the others are ``beside``."""
    environment.command("--version")
    environment.command("proxy", "--validate", "--bootstrap", ROOT / "examples/bootstrap.yaml")
    if beside:
        environment.run(OURS + THEIRS + BOTH)
        environment.run(THEIRS + OURS + BOTH)


@pytest.mark.skipif(not every_example(), reason="half a minute of pip: make nightly")
@pytest.mark.timeout(WAIT_S)
def test_in_every_order_of_installing_and_removing(environment: Environment, wheel: Path) -> None:
    others = ("--no-deps", "--require-hashes", "-r", ROOT / "requirements/rivals.lock")
    environment.pip("install", "--no-deps", wheel)
    environment.pip("install", *others)
    works(environment, beside=True)
    environment.pip("install", "--no-deps", "--force-reinstall", wheel)
    works(environment, beside=True)
    environment.pip("uninstall", "-y", "xds-protos")  # and with it xds/__init__.py
    works(environment, beside=False)
    environment.pip("install", *others)
    environment.pip("uninstall", "-y", "ztunnel-py")
    environment.run(THEIRS)


@pytest.mark.compiled
@pytest.mark.skipif(not every_example(), reason="three minutes of pip, mypyc and C compiler: make nightly")
@pytest.mark.timeout(2 * WAIT_S)
def test_a_compiled_wheel_is_built_from_locked_packages_alone(environment: Environment, tmp_path: Path) -> None:
    environment.pip("install", "--no-deps", "--force-reinstall", build(sys.executable, tmp_path, compiled=True))
    works(environment, beside=False)
