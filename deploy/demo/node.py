"""The demo of Envoy's xDS dialect: interception on the node, with the listeners of the ambient mesh of 2022."""

import contextlib
import json
import subprocess
import time
from dataclasses import dataclass
from functools import partial

from deploy.demo.stage import (
    OUTSIDE,
    PORT,
    VERSIONS,
    VIP,
    ZTUNNEL_COMMAND,
    Call,
    Demo,
    Unexpected,
    connect,
    enter,
    row,
    short,
)
from deploy.lab import Place
from tproxy.aio.kernel import BlockingKernel
from tproxy.node import HOST, OWNERSHIP, ZTUNNEL, node


@dataclass
class NodeDemo(Demo):
    """The demo with TPROXY on each node, and a control plane that sends listeners."""

    setting = "two nodes, their pods, a control plane, a proxy per node"

    def start(self) -> None:
        """Start interception, applications, control plane and proxies; returns when all are ready."""
        for worker in self.lab.workers.values():
            members = [name for name in worker.pods if name != OUTSIDE]
            netns = {ZTUNNEL: worker.ztunnel.netns, HOST: worker.place.netns}
            with contextlib.closing(BlockingKernel(netns, OWNERSHIP)) as kernel:
                changes = kernel.apply(node(worker.wanted(members)))
            print(f"  {worker.place.name}: interception of {len(members)} pods in place, {len(changes)} changes")
        self.start_applications()
        self.start_control_plane("--json-log")
        for name in self.lab.workers:
            self.proxies[name] = self._start_proxy(name)
        for name, worker in self.lab.workers.items():
            self.wait(f"the proxy of {name}", partial(self._is_live, worker.ztunnel))
        self.wait_for_applications()

    def _start_proxy(self, node: str, epoch: int = 0) -> "subprocess.Popen[bytes]":
        command = [*ZTUNNEL_COMMAND, "proxy", "--control-plane", f"unix:{self.socket}", "--node", node]
        more = ["--log-flush", "100ms", "--shutdown", "30s", "--restart-epoch", str(epoch)]
        more += ["--tap-socket", str(self.tap_socket(node))]
        return self.run_proxy(node, self.lab.worker(node).ztunnel, [*command, *more], generation=epoch)

    def succeed(self, node: str) -> "subprocess.Popen[bytes]":
        proxy = self._start_proxy(node, epoch=1)
        self.wait("the second generation", partial(self._is_live, self.lab.worker(node).ztunnel, epoch=1))
        return proxy

    def _is_live(self, ztunnel: Place, epoch: int = 0) -> bool:
        """Return whether a new proxy is live. Until then, its predecessor answers on the shared port."""
        info = json.loads(self.page(ztunnel, 15000, "/server_info")[1])
        return bool(info["state"] == "LIVE" and info["command_line_options"]["restart_epoch"] == epoch)

    def acts(self) -> None:
        self._act_rotation()
        self._act_pod_address()
        self._act_outside()
        self._act_refused()
        self._act_move()
        self.act_successor()
        self._act_dump()

    def _hops(self) -> list[dict[str, object]]:
        """Return the new access log lines, in the order of the hops on the path."""
        return sorted(self.new_lines(), key=lambda line: _place_on_path(str(line["hop"])))

    def _show(self, title: str, call: "Call", expected: bool, hops: list[dict[str, object]]) -> None:
        """Show a call and the proxies' lines about it."""
        self.check(expected, f"{title}: {call}")
        seen = set()
        for hop in hops:
            key = (hop["node"], hop["hop"], hop["chain"], hop["upstream"])
            if (
                str(hop["hop"]).endswith(("capture listener", "inbound listener", "listener plaintext"))
                or key in seen
            ):
                continue  # the listener's line about the same connection
            seen.add(key)
            print(_row(hop))

    def _act_rotation(self) -> None:
        """Call the service's address six times. Its three versions on both nodes must answer in turn."""
        print(f"\nproductpage calls the service reviews at {VIP}:{PORT}")
        answers = []
        for _ in range(6):
            call = self.call("productpage", VIP)
            hops = self._hops()
            answers.append(call.answered_by)
            self._show("service", call, call.answered_by.startswith("reviews-v"), hops)
        even = sorted(answers) == sorted([*VERSIONS] * 2)
        self.check(even, f"each version answered twice: {', '.join(answers)}")

    def _act_pod_address(self) -> None:
        """Call a pod's own address on the other node. This path has one hop less, and keeps the client's
        address.
        """
        print("\nproductpage calls a pod of the other node by its address")
        call = self.call("productpage", str(self.lab.pod("reviews-v1").ipv4))
        kept = call.peer == str(self.lab.pod("productpage").ipv4)
        self._show("pod, IPv4", call, call.answered_by == "reviews-v1" and kept, self._hops())
        call = self.call("productpage", str(self.lab.pod("reviews-v1").ipv6))
        kept = call.peer == str(self.lab.pod("productpage").ipv6)
        self._show("pod, IPv6", call, call.answered_by == "reviews-v1" and kept, self._hops())

    def _act_outside(self) -> None:
        """Call from outside the mesh in plain text. A pod accepts this unless a policy forbids it."""
        print("\na pod outside the mesh calls one inside")
        call = self.call(OUTSIDE, str(self.lab.pod("ratings").ipv4))
        self._show("outside", call, call.answered_by == "ratings", self._hops())
        call = self.call(OUTSIDE, str(self.lab.pod("reviews-v1").ipv4))
        self._show("outside, to a protected pod", call, bool(call.error), self._hops())

    def _act_refused(self) -> None:
        """Call from a client whose identity the policy does not name."""
        print("\na pod with another identity calls reviews; its policy names productpage only")
        call = self.call("intruder", VIP)
        hops = self._hops()
        denied = any("rbac_access_denied" in str(hop["termination"]) for hop in hops)
        self._show("refused", call, bool(call.error) and denied, hops)

    def _act_move(self) -> None:
        """Move traffic to other pods by a change in the control plane, while a connection stays open."""
        print("\nthe mesh file changes: reviews is only reviews-v2 now; one connection stays open meanwhile")
        connection = connect(self.lab.pod("productpage"), VIP, PORT)
        before = self.call_on(connection, "productpage", VIP)
        self.replace("mesh.yaml", self.mesh(reviews=("reviews-v2",)))
        moved = [""]

        def all_moved() -> bool:
            moved[:] = [self.call("productpage", VIP).answered_by for _ in range(3)]
            return set(moved) == {"reviews-v2"}

        began = time.monotonic()
        try:
            self.wait("the change", all_moved, 10.0)
        except Unexpected:
            self.check(False, f"new connections still go to {', '.join(moved)}")
        else:
            self.check(
                True, f"new connections go to reviews-v2 only, {time.monotonic() - began:.1f} s after the edit"
            )
        after = self.call_on(connection, "productpage", VIP)
        same = before.answered_by == after.answered_by != ""
        self.check(same, f"the open connection goes on with {after.answered_by or after.error}")
        connection.close()
        self._hops()

    def _act_dump(self) -> None:
        """Show the proxy's active configuration."""
        print("\ncurl -s 127.0.0.1:15000/config_dump?include_eds, on worker2")
        dump = json.loads(self.page(self.lab.worker("worker2").ztunnel, 15000, "/config_dump?include_eds")[1])
        kinds = [config["@type"].rpartition(".")[2] for config in dump["configs"]]
        for index, kind in enumerate(kinds):
            print(f"      configs[{index}]  {kind}")
        wanted = ["BootstrapConfigDump", "ClustersConfigDump", "EndpointsConfigDump"]
        self.check(kinds[:1] + [k for k in kinds if k in wanted[1:]] == wanted, "the dump has its order")
        endpoints = next(c for c in dump["configs"] if c["@type"].endswith("EndpointsConfigDump"))
        mine = "bookinfo-productpage_to_http_reviews"
        for entry in endpoints.get("dynamic_endpoint_configs", []):
            config = entry["endpoint_config"]
            if mine in config.get("cluster_name", ""):
                text = json.dumps(config["endpoints"][0]["lb_endpoints"][0], indent=1)
                print("\n".join("      " + line for line in text.splitlines()))
                self.check("reviews" in config["cluster_name"], "the endpoint of the moved service is there")
                return
        self.check(False, "no endpoints of the service in the dump")

    def explain(self) -> None:
        """Print commands to inspect the running demo."""
        inside = enter(self.lab.worker("worker2").ztunnel)
        pod = enter(self.lab.pod("productpage"))
        ztunnel = " ".join(ZTUNNEL_COMMAND)
        intruder = self.lab.pod("intruder").ipv4
        self.print_hints(
            {
                "mesh file": f"{self.folder / 'mesh.yaml'}   (edit it: the proxies follow)",
                "logs": f"{self.folder}/*.log",
                "a pod calls": f"{pod} curl -s http://{VIP}:{PORT}/",
                "admin": f"{inside} curl -s 127.0.0.1:15000/help",
                **self.live_page(self.lab.worker("worker2").ztunnel),
                "connections": f"{inside} {ztunnel} connections",
                "plain text": self.tap("worker2", str(self.lab.pod("productpage").ipv4)),
                "why, why not": f"{inside} {ztunnel} explain {intruder} {VIP}:{PORT}",
                "its state": f"{inside} {ztunnel} status   (policies, certificates, ...)",
            }
        )
        self.print_traffic()


def _row(hop: dict[str, object]) -> str:
    """Return a hop as a row of the table."""
    upstream = str(hop["upstream"] or "-").replace(
        "envoy://outbound_tunnel_lis_spiffe://cluster.local/ns/default/sa/", ""
    )
    who = " -> ".join(short(hop[key]) for key in ("client_identity", "server_identity") if hop[key])
    said = next((str(hop[key]) for key in ("termination", "failure") if hop[key]), "")
    return row(
        (
            f"{hop['node']:7}",
            f"{str(hop['hop']).replace('(no waypoint proxy)', '(no waypoint)'):33}",
            f"to {upstream:37}",
            f"{hop['bytes_received']} B in {hop['bytes_sent']} B out",
            f"{hop['duration_ms']} ms",
            who and f"as {who}",
            said,
        )
    )


def _place_on_path(hop: str) -> int:
    """Return the position of a hop between client and application, for sorting: timestamps in milliseconds can be
    equal.
    """
    words = ("capture", "outbound tunnel", "passthrough", "inbound")
    return next((place for place, word in enumerate(words) if hop.startswith(word)), len(words))
