"""Runs ``ztunnel proxy`` in an Istio mesh: reads its environment, serves, and returns the exit status."""

import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ztunnel.proxy.istio.environment import config_from
from ztunnel.proxy.istio.settings.config import IstioConfig
from ztunnel.runtime.tasks import errors_of


def check(env: Mapping[str, str], arguments: str) -> IstioConfig:
    """Return the configuration that an environment describes.

    Raises:
        SettingsError: lists all invalid values.
    """
    return config_from(env, cpus=cpus_available(), arguments=arguments)


def validate(config: IstioConfig) -> int:
    """Print the faults in a configuration and its files, or a summary of the checks. Return the exit status."""
    from xds.errors import ConfigError
    from ztunnel.proxy.istio.files import Findings

    files = Findings(config)
    warnings, faults, local = [*config.warnings, *files.warnings], list(files.faults), ""
    faults += _faults_of_addons(config)
    try:
        local = _local_file(config)
    except ConfigError as error:
        faults.append(str(error))
    for warning in warnings:
        print(f"Warning: {warning}", file=sys.stderr)
    for fault in faults:
        print(f"Error: {fault}", file=sys.stderr)
    if not faults:
        said = described(config, local, files.contexts, len(warnings))
        print(f"configuration is valid: {said}", file=sys.stderr)
    return 1 if faults else 0


def _faults_of_addons(config: IstioConfig) -> list[str]:
    if config.addons is None:
        return []
    from ztunnel.proxy.addons.load import faults_of

    return faults_of(config.addons)


def described(config: IstioConfig, local: str, contexts: int, warnings: int) -> str:
    """Return a readable summary of a valid environment: the control plane and the files needed for a start."""
    parts = {
        "control plane": config.xds_address,
        "certificates from": config.ca_address,
        "local file": local,
        "Calico's policies from": (config.policies.directory or config.policies.sync) if config.policies else "",
        "addons": str(len(config.addons.specs)) if config.addons else "",
        "TLS contexts": str(contexts) if contexts else "",
        "warnings": str(warnings) if warnings else "",
    }
    return ", ".join(f"{name} {value}" for name, value in parts.items() if value)


def _local_file(config: IstioConfig) -> str:
    path = config.local_xds_path
    if not path and not config.local_xds:
        return ""
    from xds.dialects.istio.local_file import parse_local_file
    from xds.errors import ConfigError
    from ztunnel.proxy.istio.xds.mesh_feed import read_local_file

    name = path or "LOCAL_XDS"
    try:
        local = read_local_file(path) if path else parse_local_file(config.local_xds)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    counts = {"workloads": local.workloads, "services": local.services, "policies": local.policies}
    return f"{name} ({', '.join(f'{kind} {len(found)}' for kind, found in counts.items())})"


def cpus_available(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the number of CPUs available to this process: its affinity, limited by its control group (v2)."""
    cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = cgroup.read_text().split()
        return min(cpus, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no limit: "max", or no such file
        return cpus


def run(config: IstioConfig) -> int:
    """Serve until a signal or ``/quitquitquit``, and return the process's exit status."""
    # gRPC's core writes to standard error, for example on a GOAWAY, bypassing the log's filter and format.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    import uvloop

    from tproxy.errors import TproxyError
    from xds.errors import ConfigError
    from ztunnel.proxy.istio.app import IstioProxy

    async def serve() -> None:
        await IstioProxy(config).run()

    status = 0
    try:
        uvloop.run(serve())
    except* (ConfigError, TproxyError) as group:
        for error in errors_of(group):
            print(f"Error: {error}", file=sys.stderr)
        status = 1
    return status
