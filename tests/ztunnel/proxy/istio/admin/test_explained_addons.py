"""What ``/explain`` says of addons, and that their denial is its verdict."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from tests.ztunnel.proxy.istio.admin.test_explain_page import explanation, usual
from tests.ztunnel.proxy.istio.inbound_case import NEAR, POD
from tests.ztunnel.proxy.istio.pods import Cluster, play
from ztunnel.addons import Addon, Deny, Facts, Prefer, Verdict
from ztunnel.proxy.addons.host import AddonHost
from ztunnel.proxy.addons.interrupt import Interrupter
from ztunnel.proxy.addons.load import load_class
from ztunnel.proxy.addons.settings import AddonSettings, parse_spec
from ztunnel.proxy.istio.path.addons import PodAddons


class Steers(Addon):
    def connecting(self, facts: Facts) -> Verdict | None:
        return Prefer({"version": "v2"}) if facts.destination.name == "server" else None


class Lots(Addon):
    pure = False

    def connecting(self, facts: Facts) -> Verdict | None:
        raise AssertionError("is not called")


class Waits(Addon):
    async def connecting(self, facts: Facts) -> Verdict | None:
        raise AssertionError("is not called")


class Gate(Addon):
    def accepting(self, facts: Facts) -> Deny | None:
        return Deny("not to 8080") if facts.destination_port == 8080 else None


class Fails(Addon):
    def accepting(self, facts: Facts) -> Deny | None:
        raise ValueError("bad day")


def explained(folder: Path, *classes: type) -> dict[str, object]:
    answers = []

    async def body(cluster: Cluster) -> None:
        await cluster.start(NEAR, POD)
        usual(cluster)
        host = AddonHost([load_class(each, {}) for each in classes])
        cluster.node.addons = PodAddons(host)
        answers.append(explanation(cluster))
        assert not any(each.suspended for each in host.addons)
        assert not any(counts.calls for counts in host.counts())

    play(folder, body)
    found: dict[str, object] = answers[0]
    return found


def test_explain_shows_addon_verdicts_without_counting(tmp_path: Path) -> None:
    answer = explained(tmp_path, Steers, Lots, Waits)
    assert answer["verdict"] == "allowed"
    (way,) = answer["ways"]  # type: ignore[misc, attr-defined]
    assert way["addons"] == [
        {"addon": "steers", "says": "prefer endpoints with version=v2"},
        {"addon": "lots", "says": "not known here: it depends on more than the connection"},
        {"addon": "waits", "says": "not known here: it is asynchronous"},
    ]


def test_addon_denial_decides_the_explain_verdict(tmp_path: Path) -> None:
    answer = explained(tmp_path, Gate)
    assert answer["verdict"] == "refused by addon gate"
    (way,) = answer["ways"]  # type: ignore[misc, attr-defined]
    assert way["inbound"]["addons"] == [{"addon": "gate", "says": "deny: not to 8080"}]


def test_addon_fault_is_shown_by_explain(tmp_path: Path) -> None:
    answer = explained(tmp_path, Fails)
    assert answer["verdict"] == "refused by addon fails"
    (way,) = answer["ways"]  # type: ignore[misc, attr-defined]
    assert "ValueError: bad day" in way["inbound"]["addons"][0]["says"]


GATE = """
from pathlib import Path
from ztunnel.addons import Deny

class Gate:
    def accepting(self, facts):
        return Deny("{version}")

    def done(self):
        Path({done!r}).touch()
"""


def test_explain_follows_changed_files_of_addons_that_run_in_workers(tmp_path: Path) -> None:
    path, done = tmp_path / "gate.py", tmp_path / "done"
    path.write_text(GATE.format(version="the first", done=str(done)))

    def says(cluster: Cluster) -> str:
        (way,) = explanation(cluster)["ways"]
        found: str = way["inbound"]["addons"][0]["says"]
        return found

    async def body(cluster: Cluster) -> None:
        await cluster.start(NEAR, POD)
        usual(cluster)
        cluster.node.config = replace(cluster.node.config, addons=AddonSettings(specs=(parse_spec(str(path)),)))
        assert says(cluster) == "deny: the first"
        path.write_text(GATE.format(version="the second version", done=str(done)))
        assert says(cluster) == "deny: the second version"
        assert done.exists()
        path.write_text("class Gate:")
        assert says(cluster) == "deny: the second version"  # which the workers keep, too

    play(tmp_path, body)


class Hangs(Addon):
    def accepting(self, facts: Facts) -> Deny | None:
        time.sleep(30)
        return None


def test_hook_that_blocks_is_interrupted_while_explaining(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(NEAR, POD)
        usual(cluster)
        host = AddonHost([load_class(Hangs, {})])
        cluster.node.addons = PodAddons(host)
        began_s = time.monotonic()
        with Interrupter(host.current):
            (way,) = explanation(cluster)["ways"]
        assert time.monotonic() - began_s < 20  # not 30 s
        assert "blocked the loop" in way["inbound"]["addons"][0]["says"]
        assert not any(each.suspended for each in host.addons)

    play(tmp_path, body)
