"""Builds pure Python by default. With ``ZTUNNEL_COMPILE=1``, mypyc compiles the tunnel engine, and the steps of a
connection in an Istio mesh, from the same source.

``ZTUNNEL_COMPILE=1 pip wheel --no-build-isolation .`` makes a wheel, ``make compiled`` builds in place. The C
compiler optimises at level 3, or at the level in ``ZTUNNEL_COMPILE_LEVEL``. Level 0 builds fastest, without
symbols and without the warnings of ``-Wall``. The modules that run per chunk and per tunnel are compiled. They
must not wait inside ``try`` (``hbone/aio/waits.py`` has the reason). A class with subclasses in other modules must
be declared as such (``hbone/native.py``).
"""

import gc
import os
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

COMPILED = (
    "hbone/end_state.py",
    "hbone/engine.py",
    "hbone/events.py",
    "hbone/flow.py",
    "hbone/frames.py",
    "hbone/head.py",
    "hbone/tunnel_headers.py",
    "hbone/hpack_cache.py",
    "hbone/hpack_pieces.py",
    "hbone/output.py",
    "hbone/reader.py",
    "hbone/sender.py",
    "hbone/stream_state.py",
    "hbone/tls.py",
    "hbone/tls_records.py",
    "hbone/windows.py",
    "hbone/cost_budget.py",
    "hbone/aio/answers.py",
    "hbone/aio/connection.py",
    "hbone/aio/connection_settings.py",
    "hbone/aio/connection_tunnels.py",
    "hbone/aio/end.py",
    "hbone/aio/keepalive.py",
    "hbone/aio/link.py",
    "hbone/aio/observed.py",
    "hbone/aio/poller.py",
    "hbone/aio/relay.py",
    "hbone/aio/interval_timer.py",
    "hbone/aio/socket.py",
    "hbone/aio/spin.py",
    "hbone/aio/splice.py",
    "hbone/aio/tls_socket.py",
    "hbone/aio/tunnel.py",
    "hbone/aio/pool_connections.py",
    "hbone/aio/requests.py",
    "tproxy/aio/socket_calls.py",
    "ztunnel/proxy/dataplane/live_table.py",
    "ztunnel/proxy/flows/ring.py",
    "ztunnel/proxy/istio/accounting/access_record.py",
    "ztunnel/proxy/istio/accounting/line_rendering.py",
    "ztunnel/proxy/istio/accounting/traffic_series.py",
    "ztunnel/proxy/istio/path/planned.py",
    "ztunnel/proxy/istio/path/planned_request.py",
    "ztunnel/proxy/istio/path/plans.py",
    "ztunnel/proxy/istio/path/pod_connection.py",
    "ztunnel/proxy/istio/path/pod_dials.py",
    "ztunnel/proxy/istio/path/request_plans.py",
    "ztunnel/proxy/istio/path/socket_stock.py",
    "ztunnel/runtime/accepting.py",
    "ztunnel/runtime/descriptors.py",
    "ztunnel/runtime/durations.py",
    "ztunnel/runtime/line_queue.py",
)

#: mypy skips these packages, which no compiled module imports. Otherwise it would follow the imports of other
#: modules and check the packages, too.
UNCOMPILED = ("anyio", "click", "dns", "grpc", "h2", "httpx2", "lightkube", "requests", "rich", "uvicorn", "yaml")


def _mypy_options() -> list[str]:
    """Return mypy's options, with a copy of the project's configuration that skips the packages above.

    This saves two fifths of the translation's time. Only errors in compiled modules are reported; ``make check``
    reports all.
    """
    modules = ", ".join(f'"{name}.*"' for name in UNCOMPILED)
    project = Path("pyproject.toml").read_text(encoding="utf-8")
    config = Path("build", "mypyc.toml")
    config.parent.mkdir(exist_ok=True)
    override = f'\n[[tool.mypy.overrides]]\nmodule = [{modules}]\nfollow_imports = "skip"\n'
    config.write_text(project + override, encoding="utf-8")
    return ["--config-file", str(config), "--follow-imports=silent"]


class BuildWithRevision(build_py):
    """Records the commit in the package, in the form that ``ztunnel/runtime/revision.py`` reads.

    The commit comes from git, or for builds without a repository (such as the image's) from ``ZTUNNEL_REVISION``.
    """

    def run(self) -> None:
        """Build the package, then write the file with the commit into the result."""
        super().run()
        revision = os.environ.get("ZTUNNEL_REVISION") or _described()
        if revision and not self.editable_mode:
            (Path(self.build_lib) / "ztunnel" / "revision.txt").write_text(revision + "\n", encoding="utf-8")


def _described() -> str:
    """Return the name of the checked-out commit, with ``-dirty`` if files differ. Empty without git or a
    repository.
    """
    if not (Path(__file__).parent / ".git").exists():
        return ""
    described = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(described, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


if __name__ == "__main__":
    extensions = []
    if os.environ.get("ZTUNNEL_COMPILE") == "1":
        from mypyc.build import mypycify

        # The name puts the shared library into the package, because an editable install does not find it
        # elsewhere.
        level = os.environ.get("ZTUNNEL_COMPILE_LEVEL", "3")
        extensions = mypycify(
            [*_mypy_options(), *COMPILED],
            opt_level=level,
            debug_level="0" if level == "0" else "1",
            group_name="hbone.compiled",
        )
        gc.freeze()  # walking mypyc's three million objects again takes the end of the process 5 to 10 s
        if level == "0":  # the analysis for these warnings is two thirds of gcc's time
            for extension in extensions:
                extension.extra_compile_args = [*extension.extra_compile_args, "-Wno-all"]  # the list is shared
    setup(ext_modules=extensions, cmdclass={"build_py": BuildWithRevision})
