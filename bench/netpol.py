"""What network policy in the kernel costs: a packet, the start, one change, memory. ``make bench-netpol``.

Packets: a pod sends UDP datagrams to another pod of its node and waits for each, so that rate and p99 are of a
round trip through the forward hook; and new TCP connections, which policies judge. One policy selects the
destination, all further policies select other pods of the node, which has 10,000 pods. Variants take turns. Two
have rules in the form of Galaxy's controller (:mod:`bench.netpol_galaxy`), for the same policies and pods.
"""

import contextlib
import gc
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.netpol_cluster import cluster
from bench.netpol_galaxy import NAME, galaxy_table
from deploy.lab import Lab, Place, may_make_namespaces
from tproxy.aio.table import BlockingTable
from tproxy.expressions import Family
from tproxy.resources import Table
from ztunnel.kube.objects import ObjectKey
from ztunnel.policy.calico.compile import Compiled
from ztunnel.policy.calico.incremental import Compiler
from ztunnel.policy.calico.objects import PolicyObjects
from ztunnel.policy.netpol.table_builder import TABLE, TableBuilder, local_endpoints
from ztunnel.policy.policysync.view import View, excerpt, view_of
from ztunnel.policy.policysync.view import changes as changes_of

PODS, POLICIES, LOCAL = 10_000, 5_000, 250
ROUNDS, DATAGRAMS, CONNECTIONS = 3, 5_000, 1_500


def keyed(objects: Iterator[dict[str, Any]]) -> dict[ObjectKey, Any]:
    """Return objects by key."""
    return {
        ObjectKey(body["kind"], body["metadata"].get("namespace", ""), body["metadata"]["name"]): body
        for body in objects
    }


def peak_mib() -> float:
    """Return the largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_start(place: Place) -> None:
    """Print what a start and single changes cost, into the kernel."""
    objects = keyed(cluster(PODS, POLICIES))
    # Every 39th pod, so that all namespaces and applications are among them.
    local = [key for key in objects if key.kind == "Pod"][::39][:LOCAL]
    for key in local:
        objects[key] = {**objects[key], "spec": {**objects[key]["spec"], "nodeName": "here"}}
    before = peak_mib()
    began = time.perf_counter()
    reader, compiler, builder = PolicyObjects(), Compiler(), TableBuilder()
    changes = reader.changes(objects)
    read = time.perf_counter()
    compiler.apply(changes)
    compiled = time.perf_counter()
    built = builder.build(compiler.compiled, "here")
    made = time.perf_counter()
    with contextlib.closing(BlockingTable(TABLE, place.netns)) as table:
        table.apply(built.table)
        done = time.perf_counter()
        elements = sum(len(item.elements) for item in built.table.sets)
        print(f"start, {PODS:,} pods, {POLICIES:,} policies, {len(local)} local pods: {done - began:.1f} s")
        print(
            f"  read {read - began:.1f} s, compile {compiled - read:.1f} s, build {made - compiled:.2f} s, "
            f"kernel and read back {done - made:.2f} s"
        )
        print(
            f"  table: {len(built.table.chains)} chains, {len(built.table.sets)} sets, {elements:,} elements; "
            f"memory {peak_mib() - before:.0f} MiB above {before:.0f} MiB"
        )
        # As in a long-running process: exclude these objects from later garbage collections.
        gc.collect()
        gc.freeze()

        def once(change: Callable[[int], dict[ObjectKey, Any]]) -> tuple[list[float], list[float]]:
            walls, used = [], []
            for number in range(21):
                changed = change(number)
                wall, cpu = time.perf_counter(), time.process_time()
                compiler.apply(reader.changes(changed))
                table.apply(builder.build(compiler.compiled, "here").table)
                walls.append((time.perf_counter() - wall) * 1000)
                used.append((time.process_time() - cpu) * 1000)
            return walls, used

        def relabelled(number: int) -> dict[ObjectKey, Any]:
            key = local[0]
            body = objects[key]
            labels = body["metadata"]["labels"] | {"app": f"app-{number % 20}"}
            return {key: {**body, "metadata": {**body["metadata"], "labels": labels}}}

        def rewritten(number: int) -> dict[ObjectKey, Any]:
            key = next(key for key in objects if key.kind == "NetworkPolicy")
            spec = objects[key]["spec"]
            rule = {"from": [{"podSelector": {}}], "ports": [{"port": 9000 + number}]}
            return {key: {**objects[key], "spec": {**spec, "ingress": [*spec["ingress"], rule]}}}

        for what, change in (("a pod's label", relabelled), ("a policy's rules", rewritten)):
            walls, used = once(change)
            print(
                f"  one change, {what}: median {statistics.median(walls):.1f} ms, largest {max(walls):.1f} ms, "
                f"CPU {statistics.median(used):.1f} ms"
            )
        view, excerpts, updates = View(), [], []
        for number in range(21):
            compiler.apply(reader.changes(relabelled(number)))
            began = time.perf_counter()
            copied = excerpt(compiler.compiled, local_endpoints(compiler.compiled, "here"))
            between = time.perf_counter()
            new = view_of(copied, copied.endpoints)
            sent = sum(1 for _ in changes_of(view, new))
            view = new
            excerpts.append((between - began) * 1000)
            updates.append((time.perf_counter() - between) * 1000)
            if number == 0:
                print(f"  with --policy-sync, a proxy's first state: {sent:,} updates")
        print(
            f"  with --policy-sync, one change of a pod's label: copy {statistics.median(excerpts):.1f} ms, "
            f"differences for each process of a proxy {statistics.median(updates):.1f} ms"
        )
        table.apply(None)


def compiled_of(source: Place, destination: Place, policies: int, pods: int) -> Compiled:
    """Return the compiled form of ``policies`` policies, one for the destination, and of ``pods`` pods."""
    objects = keyed(cluster(pods, policies))
    for key in [key for key in objects if key.kind == "Pod"]:
        objects[key] = {**objects[key], "spec": {**objects[key]["spec"], "nodeName": "here"}}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "bench"}}
    objects[ObjectKey("Namespace", "", "bench")] = namespace
    for name, place in (("client", source), ("server", destination)):
        objects[ObjectKey("Pod", "bench", name)] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "bench", "labels": {"app": name}},
            "spec": {"nodeName": "here"},
            "status": {"podIP": str(place.ipv4)},
        }
    if policies:
        spec = {
            "podSelector": {"matchLabels": {"app": "server"}},
            "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "client"}}}]}],
        }
        objects[ObjectKey("NetworkPolicy", "bench", "server")] = {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "server", "namespace": "bench"},
            "spec": spec,
        }
    compiler = Compiler()
    compiler.apply(PolicyObjects().changes(objects))
    return compiler.compiled


def datagrams(source: Place, destination: Place) -> list[float]:
    """Return the time of each datagram there and back, in microseconds."""
    with source.socket(kind=socket.SOCK_DGRAM) as client, destination.socket(kind=socket.SOCK_DGRAM) as server:
        server.bind((str(destination.ipv4), 5000))
        client.connect((str(destination.ipv4), 5000))
        found = []
        for _ in range(DATAGRAMS):
            began = time.perf_counter()
            client.send(b"x")
            server.sendto(b"y", server.recvfrom(16)[1])
            client.recv(16)
            found.append((time.perf_counter() - began) * 1e6)
        return found


def connections(source: Place, destination: Place) -> list[float]:
    """Return the time of each TCP handshake, in microseconds."""
    with destination.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((str(destination.ipv4), 5001))
        server.listen(64)
        found = []
        with source.netns.entered():
            for _ in range(CONNECTIONS):
                with socket.socket() as client:
                    began = time.perf_counter()
                    client.connect((str(destination.ipv4), 5001))
                    found.append((time.perf_counter() - began) * 1e6)
                    accepted, _ = server.accept()
                    # Close with a reset, which leaves no port in TIME-WAIT.
                    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    accepted.close()
        return found


def measure_packets(place: Place, source: Place, destination: Place) -> None:
    """Print rate and p99 with different numbers of policies."""
    variants: dict[str, Table | None] = {"no table": None}
    for policies in (0, 100, POLICIES):
        compiled = compiled_of(source, destination, policies, max(policies * 2, 100))
        variants[f"{policies:,} policies"] = TableBuilder().build(compiled, "here").table
        if policies:
            made = galaxy_table(compiled, "bench/server")
            variants[f"{policies:,}, Galaxy's form"] = made
            jumps = next(len(chain.rules) for chain in made.chains if chain.name == "GLX-INGRESS")
            print(f"Galaxy's form of {policies:,} policies: {jumps:,} pods in a row, {len(made.sets):,} sets")
    packets: dict[str, list[float]] = {name: [] for name in variants}
    opened: dict[str, list[float]] = {name: [] for name in variants}
    ours = BlockingTable(TABLE, place.netns)
    galaxys = BlockingTable(NAME, place.netns, Family.IPV4)
    with contextlib.closing(ours), contextlib.closing(galaxys):
        for _ in range(ROUNDS):
            for name, table in variants.items():
                for kept in (ours, galaxys):
                    kept.apply(table if table is not None and table.name == kept.name else None)
                packets[name] += datagrams(source, destination)
                opened[name] += connections(source, destination)
        for kept in (ours, galaxys):
            kept.apply(None)
    print(f"\n{'':24}{'datagrams there and back':>32}{'new TCP connections':>30}")
    for name in variants:
        row = [name.ljust(24)]
        for values, width in ((packets[name], 32), (opened[name], 30)):
            ordered = sorted(values)
            rate, p99 = len(values) / sum(values) * 1e6, ordered[len(ordered) * 99 // 100]
            row.append(f"{rate:,.0f}/s, p99 {p99:.0f} us".rjust(width))
        print("".join(row))


def main() -> int:
    """Run the measurements and print the tables."""
    if not may_make_namespaces():
        print("network namespaces need root (CAP_SYS_ADMIN, CAP_NET_ADMIN)", file=sys.stderr)
        return 1
    with Lab({"w1": ["client", "server"]}) as lab:
        place = lab.worker("w1").place
        measure_start(place)
        measure_packets(place, lab.pod("client"), lab.pod("server"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
