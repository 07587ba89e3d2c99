"""The demo of addons in an Istio mesh: the five of ``examples/addons``, or the addon named by ``ADDON``.

For each of the five, the demo shows its effect on a connection and its line in ``explain``. For any other addon,
it shows the calls of its hooks.
"""

import contextlib
import json
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.demo.inpod import HOSTNAME, InPodDemo
from deploy.demo.stage import NODES, OUTSIDE, PORT, SETTLE_S, VERSIONS, VIP, connect
from deploy.lab import Place

EXAMPLES = Path(__file__).parents[2] / "examples" / "addons"
#: The five addons, in the order of their calls.
ADDONS = ("audit_log", "egress_allow_list", "fault_injection", "canary", "rate_limit")
_CALLS = 60
_BURST = 12
#: An address outside the mesh that no pod has resolved from a name.
_ELSEWHERE = "198.51.100.7"


@dataclass
class AddonsDemo(InPodDemo):
    """The demo of an Istio mesh whose proxies have addons."""

    setting = "two nodes, their pods, a control plane that speaks WDS, and proxies with five addons"
    places = NODES

    def start(self) -> None:
        for name in ADDONS:
            shutil.copy(EXAMPLES / f"{name}.py", self.folder)
        super().start()

    @property
    def own(self) -> str:
        """The name of the addon that is shown instead of the five. Empty shows the five."""
        return os.environ.get("ADDON", "")

    def addon_environment(self, node: str) -> Mapping[str, str]:
        if self.own:
            return {**super().addon_environment(node), "ZTUNNEL_ADDONS": str(Path(self.own).absolute())}
        options = {
            "audit-log": {"file": str(self.folder / f"audit-{node}.db")},
            "egress-allow-list": {"hosts": ["api.example.com"]},
            "fault-injection": {"labels": {"app": "ratings"}, "share": 1.0, "cut_after_bytes": 1},
            "canary": {"service": HOSTNAME, "share": 0.5, "labels": {"app": "reviews-v2"}, "seed": 1},
            "rate-limit": {"per_second": 0.1, "burst": _BURST, "namespaces": ["limited"]},
        }
        file = self.folder / f"addons-{node}.yaml"
        file.write_text(json.dumps(options, indent=1))
        return {
            "ZTUNNEL_ADDONS": ",".join(str(self.folder / f"{name}.py") for name in ADDONS),
            "ZTUNNEL_ADDON_OPTIONS": str(file),
        }

    def acts(self) -> None:
        if self.own:
            self._act_own()
            return
        self._act_list()
        self._act_audit()
        self._act_egress()
        self._act_faults()
        self._act_canary()
        self._act_rate()
        self._act_replaced()

    def explain(self) -> None:
        """Print no hints: this demo does not stay up."""

    # The play

    def _ztunnel(self, node: str) -> Place:
        return self.lab.worker(node).ztunnel

    def _explained(self, source: str, destination: str, addon: str, node: str = "worker2") -> str:
        question = f"/explain?source=default/{source}&destination={destination}"
        answer = json.loads(self.page(self._ztunnel(node), 15000, question)[1])
        places = [way.get("inbound", {}) for way in answer.get("ways", ())] + list(answer.get("ways", ()))
        said = [each["says"] for place in places for each in place.get("addons", ()) if each["addon"] == addon]
        return said[0] if said else ""

    def _show_explained(self, line: str, expected: str, addon: str) -> None:
        self.check(expected in line, f"explain: addon {addon} says: {line or '(nothing)'}")

    def _act_own(self) -> None:
        print(f"\npods call each other, past {self.own}")
        calls = [
            self.call(pod, str(self.lab.pod(server).ipv4))
            for pod in ("productpage", "intruder", "ratings")
            for server in (*VERSIONS, "ratings")
        ]
        answered = sum(not call.error for call in calls)
        print(f"  {answered} of {len(calls)} calls were answered")
        for node in NODES:
            addons = json.loads(self.page(self._ztunnel(node), 15000, "/addons")[1])
            self.check([each["state"] for each in addons] == ["active"], f"{node}: it is active")
            for hook, counts in addons[0]["hooks"].items():
                results = ", ".join(f"{result} {number}" for result, number in counts["results"].items())
                mean_us = counts["seconds"] * 1e6 / counts["calls"] if counts["calls"] else 0.0
                print(f"         {hook:13} {counts['calls']} calls, {mean_us:.1f} us each: {results or 'none'}")

    def _act_list(self) -> None:
        print("\ncurl 127.0.0.1:15000/addons, on worker2")
        addons = json.loads(self.page(self._ztunnel("worker2"), 15000, "/addons")[1])
        names = [each["name"].replace("-", "_") for each in addons]
        self.check(names == list(ADDONS), f"five addons are loaded: {', '.join(names)}")

    def _act_audit(self) -> None:
        print("\naudit_log: who talked to whom for the first time")
        for _ in range(3):
            self.call("productpage", str(self.lab.pod("reviews-v1").ipv4))
        rows: list[tuple[str, str]] = []

        def written() -> bool:
            with sqlite3.connect(self.folder / "audit-worker2.db") as database:
                rows[:] = database.execute(
                    "select source, destination from first_seen where destination like '%reviews-v1'"
                ).fetchall()
            database.close()
            return bool(rows)

        self.wait("the audit log", written, SETTLE_S)
        self.check(len(rows) == 1, f"three connections, one row: {rows[0][0]} -> {rows[0][1]}")

    def _act_egress(self) -> None:
        print("\negress_allow_list: a pod calls an address outside the mesh")
        self.new_lines()
        call = self.call("productpage", _ELSEWHERE)
        line = self._addon_line("egress-allow-list")
        self.check(bool(call.error) and "has no allowed name" in line, f"refused: {line}")
        said = self._explained("productpage", f"{_ELSEWHERE}:{PORT}", "egress-allow-list")
        self._show_explained(said, "deny: ", "egress-allow-list")

    def _act_faults(self) -> None:
        print("\nfault_injection: connections to ratings break after one byte")
        self.new_lines()
        address = str(self.lab.pod("ratings").ipv4)
        connection = connect(self.lab.pod("productpage"), address, PORT)
        self.call_on(connection, "productpage", address)
        assert connection.sock is not None
        connection.sock.settimeout(SETTLE_S)
        with contextlib.suppress(OSError):  # the access line shows how it ended
            connection.sock.recv(1)
        connection.close()
        line = self._addon_line("fault-injection")
        self.check("cut by addon fault-injection: injected fault" in line, f"cut: {line}")
        said = self._explained("productpage", f"{address}:{PORT}", "fault-injection")
        self._show_explained(said, "not known here", "fault-injection")

    def _act_canary(self) -> None:
        print(f"\ncanary: half of the connections to {HOSTNAME} prefer reviews-v2, {_CALLS} calls")
        answers = Counter(self.call("productpage", VIP).answered_by for _ in range(_CALLS))
        shares = ", ".join(f"{name or 'none'} {count}" for name, count in sorted(answers.items()))
        # reviews-v2 should get two thirds of the calls. A share below 0.4 occurs once in a hundred thousand runs.
        most = answers["reviews-v2"] > _CALLS * 0.4 and set(answers) <= set(VERSIONS) and len(answers) > 1
        self.check(most, f"reviews-v2 has more than its third: {shares}")
        said = self._explained("productpage", f"{HOSTNAME}:{PORT}", "canary")
        self._show_explained(said, "not known here", "canary")

    def _act_rate(self) -> None:
        print(f"\nrate_limit: the option changes to all namespaces; a burst of {_BURST} is admitted")
        # A proxy reads addon options only when it starts, but it reloads a changed addon file. So the demo edits
        # the file to change the limit.
        file = self.folder / "rate_limit.py"
        self.replace("rate_limit.py", file.read_text().replace("if options.namespaces and", "if False and"))
        self._wait_replaced("rate-limit")
        self.new_lines()
        address = str(self.lab.pod("ratings").ipv4)
        calls = [self.call(OUTSIDE, address) for _ in range(_BURST + 3)]
        admitted = sum(not call.error for call in calls)
        line = self._addon_line("rate-limit")
        self.check(admitted == _BURST, f"{admitted} of {len(calls)} calls from {OUTSIDE} were admitted; {line}")
        said = self._explained(OUTSIDE, f"{address}:{PORT}", "rate-limit", "worker")
        self._show_explained(said, "not known here", "rate-limit")

    def _act_replaced(self) -> None:
        print("\nwhile it runs, a file is replaced by one with a fault")
        self.replace("canary.py", "def broken(:\n")

        def kept() -> bool:
            addons = json.loads(self.page(self._ztunnel("worker2"), 15000, "/addons")[1])
            entry = next(each for each in addons if each["name"] == "canary")
            return entry["state"] == "active" and "SyntaxError" in entry["problem"]

        self.wait("the fault is reported", kept, SETTLE_S)
        self.check(self.call("productpage", VIP).answered_by in VERSIONS, "the last good version goes on")

    # Lines of the proxies

    def _wait_replaced(self, addon: str) -> None:
        def replaced() -> bool:
            log = "".join(path.read_text() for path in self.folder.glob("proxy-*.log"))
            return log.count(f"addon {addon}: its changed file is used now") == len(self.lab.workers)

        self.wait(f"{addon} is replaced", replaced, SETTLE_S)

    def _addon_line(self, addon: str) -> str:
        """Return the error in the newest access line that names this addon. Empty without such a line."""
        lines = self.new_lines(1, lambda line: line.get("scope") == "access" and addon in str(line.get("addon")))
        return str(lines[-1].get("error", "")) if lines else ""
