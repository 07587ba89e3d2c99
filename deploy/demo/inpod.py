"""The demo of an Istio mesh: interception in every pod's own namespace, with workloads and authorization.

The proxies have the environment variables of Istio's chart, and in addition the paths of this machine's control
plane and agents.
"""

import json
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import dns.exception
import dns.message
import dns.query
import dns.rdatatype

from deploy.demo.stage import (
    NODES,
    OUTSIDE,
    PORT,
    SETTLE_S,
    VERSIONS,
    VIP,
    ZTUNNEL_COMMAND,
    Call,
    Demo,
    Unexpected,
    account,
    connect,
    enter,
    row,
    short,
)
from deploy.lab import Place
from ztunnel.runtime.console.proxy_flags import ADDON_VARIABLES

HOSTNAME = "reviews.default.svc.cluster.local"
#: An address that no host has, so only the pod's own proxy can answer queries to it.
NAME_SERVER = "10.96.0.10"
#: After this number of calls, each of three endpoints has almost certainly been chosen. One run in millions misses
#: an endpoint.
_CALLS = 40
_TUNNEL_PORT = 15008
#: The network namespace of worker2's second proxy. It is separate, like that of the next pod of a DaemonSet.
_NEXT = "ztunnel-next"


@dataclass
class InPodDemo(Demo):
    """The demo with a node agent, which enrols each pod, and a proxy, which listens inside the pods."""

    setting = "two nodes, their pods, a control plane that speaks WDS, an agent and a proxy per node"
    places: ClassVar[Mapping[str, list[str]]] = {**NODES, "worker2": [*NODES["worker2"], _NEXT]}

    def start(self) -> None:
        for name, worker in self.lab.workers.items():
            members = [pod for pod in NODES[name] if pod != OUTSIDE]
            self._announce(name, members)
            agent = [*ZTUNNEL_COMMAND, "agent", "--state", f"pods-{name}.yaml", "--socket", f"{name}.zds"]
            self.run(worker.place, "agent", [*agent, "--grace", "0.2"])
            print(f"  {name}: an agent for {len(members)} pods")
        self.start_applications()
        self.start_control_plane()
        for name, worker in self.lab.workers.items():
            self.proxies[name] = self._start_proxy(name, worker.ztunnel)
        for name, worker in self.lab.workers.items():
            self.wait(f"the proxy of {name}", partial(self._is_ready, worker.ztunnel))
        self.wait_for_applications()

    def _announce(self, node: str, members: list[str]) -> None:
        """Write the description of a node's pods. The node's agent follows it."""
        pods = {
            name: {"netns": self.lab.pod(name).netns.name, "service_account": account(name)} for name in members
        }
        self.replace(f"pods-{node}.yaml", json.dumps({"pods": pods}, indent=1))

    def _start_proxy(self, node: str, place: Place) -> "subprocess.Popen[bytes]":
        meeting = self.folder / f"{node}.handover"
        meeting.mkdir(exist_ok=True)
        environment = {
            **{key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR") if key in os.environ},
            "CA_ADDRESS": f"unix:{self.socket}",
            "XDS_ADDRESS": f"unix:{self.socket}",
            "INPOD_UDS": str(self.folder / f"{node}.zds"),
            "LOG_FORMAT": "json",
            "RUST_LOG": "info",
            "RUST_BACKTRACE": "1",
            "ISTIO_META_CLUSTER_ID": "Kubernetes",
            "INPOD_ENABLED": "true",
            "TERMINATION_GRACE_PERIOD_SECONDS": "30",
            "POD_NAME": place.name,
            "POD_NAMESPACE": "istio-system",
            "NODE_NAME": node,
            "INSTANCE_IP": str(place.ipv4),
            "SERVICE_ACCOUNT": "ztunnel",
            "ZTUNNEL_TAP_SOCKET": str(self.tap_socket(node)),
            **self.addon_environment(node),
            "ZTUNNEL_HANDOVER_DIR": str(meeting),
            "ZTUNNEL_WORKER_THREADS": "1",
        }
        return self.run_proxy(node, place, [*ZTUNNEL_COMMAND, "proxy", "ztunnel"], environment)

    @property
    def hands_over(self) -> bool:
        return not self.addon_environment("worker2")  # connections whose addon hooks were called do not move

    def addon_environment(self, node: str) -> Mapping[str, str]:
        """Return the variables of a node's addons."""
        return {name: os.environ[name] for name in ADDON_VARIABLES.values() if name in os.environ}

    def _is_ready(self, place: Place) -> bool:
        return self.page(place, 15021, "/healthz/ready") == (200, "ready\n")

    def succeed(self, node: str) -> "subprocess.Popen[bytes]":
        proxy = self._start_proxy(node, self.lab.pod(_NEXT))
        self.wait("the second generation", partial(self._is_ready, self.lab.pod(_NEXT)))
        return proxy

    def acts(self) -> None:
        self._act_name()
        self._act_balance()
        self._act_pod_address()
        self._act_node_local()
        self._act_outside()
        self._act_refused()
        self._act_policy()
        self._act_removal()
        self.act_successor()
        self._act_answers()

    # Lines of the proxies

    def _records(self, at_least: int = 0) -> list[dict[str, object]]:
        """Return the new access log lines, the client side's lines first."""
        lines = self.new_lines(at_least, lambda line: line.get("scope") == "access")
        return sorted(lines, key=lambda line: line.get("direction") != "outbound")

    def _show(self, title: str, call: Call, expected: bool, records: list[dict[str, object]]) -> None:
        """Show a call and the proxies' lines about it."""
        self.check(expected, f"{title}: {call}")
        for record in records:
            print(_row(record))

    def _dump(self, place: Place) -> dict[str, object]:
        dump = json.loads(self.page(place, 15000, "/config_dump")[1])
        assert isinstance(dump, dict)
        return dump

    # The play

    def _act_name(self) -> None:
        """Look up the service's name inside a pod, where the pod's proxy answers the query."""
        print(f"\nproductpage looks up {HOSTNAME}, at a name server that is not there")
        query = dns.message.make_query(HOSTNAME, dns.rdatatype.A)
        found: list[str] = []
        for attempt in (1, 2):  # a datagram can be lost; resolvers retry
            again = ", asked again" if attempt > 1 else ""
            began = time.perf_counter()
            with self.lab.pod("productpage").netns.entered():
                try:
                    answer = dns.query.udp(query, NAME_SERVER, timeout=5.0)
                    found = [str(item) for rrset in answer.answer for item in rrset]
                    break
                except (OSError, dns.exception.Timeout) as error:
                    found = [type(error).__name__]
        took_ms = (time.perf_counter() - began) * 1000
        self.check(found == [VIP], f"DNS: {', '.join(found) or 'nothing'}, {took_ms:.1f} ms{again}")

    def _act_balance(self) -> None:
        """Call the service's address many times from each node. Each version of the service must answer at least
        once.
        """
        print(f"\nproductpage calls the service reviews at {VIP}:{PORT}, {_CALLS} times")
        self.new_lines()
        calls = [self.call("productpage", VIP) for _ in range(_CALLS)]
        records = self._records(2 * _CALLS)
        answers = Counter(call.answered_by for call in calls)
        shares = ", ".join(f"{name or 'none'} {count}" for name, count in sorted(answers.items()))
        self.check(set(answers) == set(VERSIONS), f"every version answered: {shares}")
        client = str(self.lab.pod("productpage").ipv4)
        kept = {call.peer for call in calls} == {client}
        self.check(kept, f"each saw the client's own address, {client}")
        far = [line for line in records if line.get("dst.workload") == "reviews-v1"]
        captured = [line for line in records if line["direction"] == "outbound"]
        self.check(
            len(captured) == _CALLS and all(line.get("dst.identity") for line in captured),
            f"{len(captured)} connections were captured, each with an identity at both ends",
        )
        for line in far[:1] + far[-1:]:
            print(_row(line))

    def _act_pod_address(self) -> None:
        """Call a pod's own address on the other node, with both IP versions."""
        print("\nproductpage calls a pod of the other node by its address")
        server, client = self.lab.pod("reviews-v1"), self.lab.pod("productpage")
        for version in (4, 6):
            call = self.call("productpage", str(server.address(version)))
            kept = call.peer == str(client.address(version))
            self._show(f"pod, IPv{version}", call, call.answered_by == "reviews-v1" and kept, self._records(2))

    def _act_node_local(self) -> None:
        """Call a pod of the same node. Policies apply as between nodes, but no packet leaves the node."""
        print("\nproductpage calls a pod of its own node")
        before = self.wire.report.packets
        call = self.call("productpage", str(self.lab.pod("reviews-v2").ipv4))
        records = self._records(2)
        known = len(records) == 2 and all(
            line.get("src.identity") and line.get("dst.identity") for line in records
        )
        self._show("own node", call, call.answered_by == "reviews-v2" and known, records)
        packets = self.wire.report.packets - before
        self.check(packets == 0, f"{packets} packets crossed the wire between the nodes")

    def _act_outside(self) -> None:
        """Call from outside the mesh in plain text. A pod accepts this unless a policy forbids it."""
        print("\na pod outside the mesh calls one inside")
        call = self.call(OUTSIDE, str(self.lab.pod("ratings").ipv4))
        self._show("outside", call, call.answered_by == "ratings", self._records(1))
        call = self.call(OUTSIDE, str(self.lab.pod("reviews-v1").ipv4))
        self._show("outside, to a protected pod", call, bool(call.error), self._records(1))

    def _act_refused(self) -> None:
        """Call from a client whose identity the policy does not name, on the other node and on this one."""
        print("\na pod with another identity calls reviews; its policy names productpage only")
        for title, server in (("refused", "reviews-v1"), ("refused, own node", "reviews-v2")):
            call = self.call("intruder", str(self.lab.pod(server).ipv4))
            records = self._records(2)
            denied = any("policy rejection" in str(line.get("error")) for line in records)
            self._show(title, call, bool(call.error) and denied, records)

    def _act_policy(self) -> None:
        """Change the policy while a connection is open."""
        print(
            "\nthe policy in the mesh file changes: only intruder may call reviews; a connection is open meanwhile"
        )
        connection = connect(self.lab.pod("productpage"), VIP, PORT)
        before = self.call_on(connection, "productpage", VIP)
        self.check(before.answered_by in VERSIONS, f"before: {before}")
        assert connection.sock is not None
        connection.sock.settimeout(SETTLE_S)
        began = time.monotonic()
        self.replace("mesh.yaml", self.mesh(viewer="intruder"))
        try:
            closed = connection.sock.recv(1) == b""
        except ConnectionResetError:
            closed = True
        except TimeoutError:
            closed = False
        connection.close()
        took_s = time.monotonic() - began
        self.check(
            closed, f"the open connection was {'' if closed else 'not '}closed, {took_s:.1f} s after the edit"
        )
        # The nodes receive the policies separately, and the client's node can be the first.
        self._wait_or_fail(
            "every node refuses productpage",
            lambda: all(self.call("productpage", VIP).error for _ in range(_CALLS)),
        )
        self._records()
        after = self.call("productpage", VIP)
        self._show("after", after, bool(after.error), self._records(2))
        self.replace("mesh.yaml", self.mesh())
        self._wait_or_fail(
            "productpage may call again once the file is as it was",
            lambda: set(VERSIONS) <= {self.call("productpage", VIP).answered_by for _ in range(_CALLS)},
        )
        self._records()

    def _act_removal(self) -> None:
        """Remove one pod from the mesh: the agent removes its rules, the proxy closes its listeners."""
        print("\nreviews-v3 leaves the mesh and the service")
        place = self.lab.pod("reviews-v3")
        ztunnel = self.lab.worker("worker2").ztunnel
        was_captured = _tunnel_port_is_open(place)
        staying = tuple(name for name in VERSIONS if name != "reviews-v3")
        self.replace("mesh.yaml", self.mesh(reviews=staying, outside=(OUTSIDE, "reviews-v3")))
        self._announce("worker2", [pod for pod in NODES["worker2"] if pod != "reviews-v3"])

        def gone() -> bool:
            state = self._dump(ztunnel)["workloadState"]
            assert isinstance(state, dict)
            return "default/reviews-v3" not in state and not _tunnel_port_is_open(place)

        self._wait_or_fail("its listeners are gone, and so it is from the dump", lambda: was_captured and gone())
        self._records()
        answers = {self.call("productpage", VIP).answered_by for _ in range(_CALLS)}
        self._records(2 * _CALLS)
        self.check(answers == set(staying), f"the service goes on with {', '.join(sorted(answers))}")
        call = self.call("reviews-v3", str(self.lab.pod("reviews-v2").ipv4))
        records = self._records(1)
        plain = [line["direction"] for line in records] == ["inbound"] and "src.identity" not in records[0]
        self._show("reviews-v3 has no identity any more", call, bool(call.error) and plain, records)

    def _act_answers(self) -> None:
        """Show what the proxy reports about itself."""
        place = self.lab.pod(_NEXT)
        print("\ncurl -s 127.0.0.1:15000/config_dump, :15020/metrics and :15021/healthz/ready, on worker2")
        dump = self._dump(place)
        state, services = dump["workloadState"], dump["services"]
        assert isinstance(state, dict)
        assert isinstance(services, list)
        up = sorted(pod for pod, shown in state.items() if shown["state"] == "Up")
        for key in ("workloads", "services", "policies", "certificates"):
            found = dump[key]
            assert isinstance(found, list)
            print(f"      {key:13} {len(found)}")
        print(f"      workloadState {', '.join(up)}")
        expected = [f"default/{pod}" for pod in NODES["worker2"] if pod != "reviews-v3"]
        self.check(up == sorted(expected), "the dump has every captured pod of the node, up")
        endpoints = next((len(item["endpoints"]) for item in services if item["hostname"] == HOSTNAME), 0)
        self.check(endpoints == 2, f"and the service with {endpoints} endpoints")
        metrics = self.page(place, 15020, "/metrics")[1]
        opened = [line for line in metrics.splitlines() if line.startswith("istio_tcp_connections_opened_total{")]
        mutual = sum(float(line.split()[-1]) for line in opened if "mutual_tls" in line)
        self.check(mutual > 0, f"the metrics count {mutual:g} connections over mutual TLS since the replacement")
        for pod, allowed in (("productpage", True), ("intruder", False)):
            question = f"/explain?source=default/{pod}&destination={HOSTNAME}:{PORT}"
            told = json.loads(self.page(place, 15000, question)[1])
            why = "; ".join(_deciding(way["inbound"]) for way in told["ways"][:1])
            right = (told["verdict"] == "allowed") is allowed
            self.check(right, f"it explains {pod} -> reviews: {told['verdict']}; {why}")
        status, text = self.page(place, 15021, "/healthz/ready")
        self.check((status, text) == (200, "ready\n"), f"readiness: {status} {text.strip()}")

    def _wait_or_fail(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait until an expectation is met, and show the result."""
        began = time.monotonic()
        try:
            self.wait(what, condition, SETTLE_S)
        except Unexpected:
            self.check(False, f"{what}: not within {SETTLE_S:g} s")
        else:
            self.check(True, f"{what}, after {time.monotonic() - began:.1f} s")

    def explain(self) -> None:
        inside = enter(self.lab.pod(_NEXT))
        pod = enter(self.lab.pod("productpage"))
        ztunnel = " ".join(ZTUNNEL_COMMAND)
        what_if = f"{inside} {ztunnel} simulate --remove default/reviews-viewer --from-log -"
        self.print_hints(
            {
                "mesh file": f"{self.folder / 'mesh.yaml'}   (edit it: the proxies follow)",
                "pods": f"{self.folder}/pods-*.yaml   (edit them: the agents follow)",
                "logs": f"{self.folder}/*.log",
                "a pod calls": f"{pod} curl -s http://{VIP}:{PORT}/",
                **({"its rules": f"{pod} nft list ruleset"} if shutil.which("nft") else {}),
                "why, why not": f"{inside} {ztunnel} explain default/intruder {HOSTNAME}:{PORT}",
                "its state": f"{inside} {ztunnel} status   (workloads, services, ...)",
                **self.live_page(self.lab.pod(_NEXT)),
                "connections": f"{inside} {ztunnel} connections",
                "plain text": self.tap("worker2", "default/productpage"),
                "what if": f"cat {self.folder}/proxy-*.log | {what_if}",
                "everything": f"{inside} curl -s 127.0.0.1:15000/config_dump",
                "more log": f"{inside} curl -s -X POST '127.0.0.1:15000/logging?level=debug'",
            }
        )
        self.print_traffic()


def _deciding(inbound: dict[str, object]) -> str:
    """Return the policy that decided, from an explanation of a connection's inbound side."""
    return str(inbound.get("allowed_by") or inbound.get("refused"))


def _tunnel_port_is_open(pod: Place) -> bool:
    """Return whether a proxy listens inside a pod."""
    with pod.socket() as sock:
        sock.settimeout(1.0)
        return sock.connect_ex(("127.0.0.1", _TUNNEL_PORT)) == 0


def _row(record: dict[str, object]) -> str:
    """Return an access log line as a row of the table."""
    who = " -> ".join(short(record[key]) for key in ("src.identity", "dst.identity") if key in record)
    workloads = " -> ".join(str(record.get(key, "-")) for key in ("src.workload", "dst.workload"))
    received, sent = record.get("bytes_recv"), record.get("bytes_sent")
    return row(
        (
            f"{record['node']:8}",
            f"{record['direction']:8}",
            f"{workloads:26}",
            f"to {record['dst.addr']:26}",
            "" if received is None else f"{received} B in {sent} B out",
            str(record.get("duration", "")),
            who and f"as {who}",
            str(record.get("error", "")),
        )
    )
