"""The table of ``make netpol``: each scenario as plain connections and through tunnels; how many were right."""

import contextlib
import logging
import time

from deploy.lab import may_make_namespaces
from tests.netns.netpol_api import ApiObjects
from tests.netns.netpol_harness import Cluster, has_sctp, outcome, probes
from tests.netns.netpol_scenarios import SCENARIOS
from tests.netns.netpol_tunnels import TunnelledCluster


def main() -> int:
    """Print the table, and return how many scenarios were not as expected in either way."""
    if not may_make_namespaces():
        print("NOT TESTED: network namespaces need root (CAP_SYS_ADMIN, CAP_NET_ADMIN)")
        return 1
    logging.basicConfig(level=logging.ERROR)
    failed = connections = 0
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        api = stack.enter_context(ApiObjects()) if ApiObjects.available() else None
        if api is not None:
            print("objects: written to a real API server, and read from it by the informer")
        else:
            print("objects: given to the compiler as they are; no kube-apiserver here, `make kube` makes one")
        columns: dict[str, Cluster] = {
            "plain": stack.enter_context(Cluster()),
            "tunnelled": stack.enter_context(TunnelledCluster()),
        }
        for cluster in columns.values():
            cluster.through = api.through if api is not None else None
        print("".join(name.ljust(11) for name in columns) + "connections each, scenario")
        # One way after the other: their pods differ, and the API server would be given all of them each time.
        plain = {name: outcome(columns["plain"], name) for name in SCENARIOS}
        for name, steps in SCENARIOS.items():
            wrong = {"plain": plain[name], "tunnelled": outcome(columns["tunnelled"], name)}
            failed += any(wrong.values())
            count = 2 * sum(len(probes(step.probes)) for step in steps)
            connections += count
            marks = "".join(("WRONG" if found else "ok").ljust(11) for found in wrong.values())
            print(f"{marks}{count:4}  {name}")
            for column, found in wrong.items():
                for text in found:
                    print(f"  {column}: {text}")
        for key, reason in api.refused.items() if api is not None else ():
            print(f"refused by the API, and given to the compiler past it: {key}: {reason}")
    sctp = "SCTP sockets" if has_sctp() else "SCTP as raw packets, since this kernel has no sockets for it"
    print(
        f"{len(SCENARIOS) - failed} of {len(SCENARIOS)} scenarios as expected, {connections} connections over "
        f"IPv4 and IPv6, each plain and tunnelled, {sctp}, {time.monotonic() - began:.1f} s"
    )
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
