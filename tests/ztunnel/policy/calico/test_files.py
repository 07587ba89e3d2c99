"""Policies from files, followed while they change."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from ipaddress import ip_network
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import uvloop
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.ztunnel.policy.calico.stores import FLOW
from xds.model import calico as c
from ztunnel.policy.calico.compile import compile_resources
from ztunnel.policy.calico.evaluator import Evaluator
from ztunnel.policy.calico.files import FilePolicies, Files, read_files, updates_of
from ztunnel.policy.calico.guard import Guard
from ztunnel.policy.calico.read import read_resources
from ztunnel.policy.calico.resources import Resources
from ztunnel.policy.calico.store import Store
from ztunnel.runtime.clock import SystemClock
from ztunnel.runtime.formats.config_reader import Faults

PODS = """
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, uid: u-web, labels: {app: web}}
spec: {serviceAccountName: web, nodeName: node}
status: {podIPs: [{ip: 10.0.0.1}]}
---
apiVersion: v1
kind: Pod
metadata: {name: db, namespace: shop, uid: u-db, labels: {app: db}}
spec: {serviceAccountName: db, nodeName: node}
status: {podIPs: [{ip: 10.0.0.2}]}
"""
POLICY = """
apiVersion: projectcalico.org/v3
kind: GlobalNetworkPolicy
metadata: {{name: to-db}}
spec:
  selector: app == 'db'
  ingress: [{{action: {action}, source: {{selector: app == 'web'}}}}]
"""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_change_is_followed_and_a_document_that_cannot_be_read_leaves_its_last_good_form(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    changes: list[None] = []

    async def main() -> None:
        files = Files(tmp_path, SystemClock(), lambda: changes.append(None))
        guard = Guard(lambda: files.evaluator, lambda: 0.0)

        def allowed() -> bool:
            return guard.check(c.Direction.INGRESS, FLOW).allowed

        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(files.run())
            (tmp_path / "pods.yaml").write_text(PODS)
            policy.write_text("kind: Nonsense")
            await until(lambda: files.error != "")
            assert "policy.yaml" in files.error
            assert (allowed(), files.in_sync, files.age_s) == (False, False, 0.0)
            policy.write_text(POLICY.format(action="Allow"))
            await until(lambda: files.in_sync)
            assert (allowed(), files.error, files.age_s) == (True, "", 0.0)
            policy.write_text(POLICY.format(action="Allow") + "  broken: [")
            await until(lambda: not files.in_sync)
            assert allowed()
            assert "policy.yaml: document 1 at line 1: not valid YAML" in files.error
            await until(lambda: files.age_s > 0)
            policy.write_text(POLICY.format(action="Perhaps"))
            await until(lambda: "Perhaps" in files.error)
            await until(lambda: not allowed())
            policy.write_text(POLICY.format(action="Deny"))
            await until(lambda: files.in_sync)
            assert not allowed()
            running.cancel()
        assert len(changes) == 4

    uvloop.run(main())


def global_policy(name: str, action: str, source: str, selector: str = "app == 'db'") -> str:
    """Return a policy that is read before policies with a later name."""
    return (
        "apiVersion: projectcalico.org/v3\n"
        "kind: GlobalNetworkPolicy\n"
        "metadata:\n"
        f"  name: {name}\n"
        "spec:\n"
        f"  order: {ord(name)}\n"
        f"  selector: {selector}\n"
        f"  ingress: [{{action: {action}, source: {{selector: {source}}}}}]\n"
    )


def a_pod(name: str, address: str) -> str:
    return (
        "apiVersion: v1\n"
        "kind: Pod\n"
        "metadata:\n"
        f"  name: {name}\n"
        f"  namespace: shop\n"
        f"  labels: {{app: {name}}}\n"
        f"status: {{podIPs: [{{ip: {address}}}]}}\n"
    )


ADDRESSES = {"web": "10.0.0.1", "db": "10.0.0.2", "job": "10.0.0.3"}
PODS_EACH = [a_pod(name, address) for name, address in ADDRESSES.items()]
POLICIES = st.builds(
    lambda action, source, selector: (action, source, selector),
    st.sampled_from(("Allow", "Deny")),
    st.sampled_from(("app == 'web'", "app == 'job'", "all()")),
    st.sampled_from(("app == 'db'", "app == 'job'", "all()")),
)
#: Changes that make a document unreadable, or an object impossible to identify.
UNREADABLE: list[Callable[[str], str]] = [
    lambda text: text + "broken: [\n",
    lambda text: text + 'broken: "x\n',
    lambda text: text + "\tx: 1\n",
    lambda text: text + "kind: Pod\n",
    lambda text: text.replace("  name:", "  nam:"),
    lambda text: text.replace("kind: ", "kind: Un"),
    lambda text: text.replace("kind: ", "sort: "),
    lambda text: f"[{text}",
    lambda text: text.replace("metadata:\n", "metadata: x\n"),
    lambda text: "x",
    lambda text: text[: len(text) // 2] + "\n  - {\n",
]
#: Changes after which the object still has its name.
FAULTY: list[Callable[[str], str]] = [
    lambda text: text.replace("action: ", "action: Un"),
    lambda text: text.replace("selector: app ==", "selector: app ="),
    lambda text: text.replace("spec:\n", "spec:\n  types: [Inward]\n"),
    lambda text: text.replace("source:", "from:"),
]
PAIRS = [(source, to) for source in ADDRESSES for to in ADDRESSES if source != to]


def allowed_pairs(resources: Resources) -> set[tuple[str, str]]:
    """Return the pairs of pods of which the first reaches the second."""
    evaluator = Evaluator(Store(), connections_only=True)
    for update in updates_of(compile_resources(resources)):
        evaluator.apply(update)
    guard = Guard(lambda: evaluator, lambda: 0.0)
    return {
        (source, to)
        for source, to in PAIRS
        if all(
            guard.check(direction, c.Flow(source_ip=ADDRESSES[source], destination_ip=ADDRESSES[to],
                                          destination_port=80)).allowed
            for direction in c.Direction
        )
    }  # fmt: skip


def texts_of(policies: list[tuple[str, str, str]]) -> list[str]:
    return PODS_EACH + [global_policy(chr(ord("a") + at), *policy) for at, policy in enumerate(policies)]


def in_files(folder: Path, texts: list[str], *, split: int) -> None:
    """Write documents to two files, the first ``split`` of them to the first."""
    for name, part in (("a.yaml", texts[:split]), ("b.yaml", texts[split:])):
        (folder / name).write_text("---\n".join(part))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(POLICIES, min_size=1, max_size=4),
    st.integers(0, 6),
    st.integers(0, 7),
    st.sampled_from([*UNREADABLE, *FAULTY]),
    st.booleans(),
)
def test_a_damaged_document_costs_no_other_and_lets_nothing_more_through(
    policies: list[tuple[str, str, str]], which: int, split: int, damage: Callable[[str], str], started: bool
) -> None:
    whole = texts_of(policies)
    at = which % len(whole)
    damaged = [*whole[:at], damage(whole[at]), *whole[at + 1 :]]
    assume(damaged != whole)
    expected = read_resources(dict(enumerate_files(whole)))
    with TemporaryDirectory() as name:
        folder = Path(name)
        found = FilePolicies(folder)
        if started:
            in_files(folder, whole, split=split)
            assert found.read() == expected
            assert (found.complete, found.faults) == (True, ())
        in_files(folder, damaged, split=split)
        resources = found.read()
        assert found.faults
        if started:
            assert found.complete
            # Policies outside the damaged text are unchanged. If the text cannot be read at all, all resources
            # are.
            mine = set(read_resources({"x.yaml": whole[at]}).policies)
            assert {key: resources.policies[key] for key in expected.policies if key not in mine} == {
                key: value for key, value in expected.policies.items() if key not in mine
            }
            if damage in UNREADABLE:
                assert resources == expected
        if found.complete:
            assert allowed_pairs(resources) <= allowed_pairs(expected)
        else:
            assert damage in UNREADABLE
        in_files(folder, whole, split=split)
        assert found.read() == expected
        assert (found.complete, found.faults) == (True, ())


def enumerate_files(texts: list[str]) -> Iterator[tuple[str, str]]:
    return ((f"{number}.yaml", text) for number, text in enumerate(texts))


def test_changes_beside_a_damaged_document_apply_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    allow = global_policy("a", "Allow", "app == 'web'")
    deny = global_policy("b", "Deny", "app == 'job'")
    caplog.set_level(logging.ERROR, logger="ztunnel.kube.files")  # netpol explain silences it in this process
    (tmp_path / "a.yaml").write_text("---\n".join([*PODS_EACH, allow, deny]))
    found = FilePolicies(tmp_path)
    assert ("web", "db") in allowed_pairs(found.read())
    changed = global_policy("a", "Deny", "app == 'web'")
    (tmp_path / "a.yaml").write_text("---\n".join([*PODS_EACH, changed, deny + "broken: [\n"]))
    (tmp_path / "b.yaml").write_text(global_policy("c", "Allow", "app == 'job'", "app == 'web'"))
    assert allowed_pairs(found.read()) & {("web", "db"), ("job", "web"), ("job", "db")} == {("job", "web")}
    [line] = caplog.messages
    assert "a.yaml error=document 5 at line 33: not valid YAML" in line
    assert "at line 43, column 1" in line
    assert line.endswith("what has disappeared stays as it was: GlobalNetworkPolicy/b")


def test_an_object_that_leaves_a_file_beside_a_damaged_one_stays(tmp_path: Path) -> None:
    """It can have been moved to the document that cannot be read."""
    deny = global_policy("b", "Deny", "all()")
    (tmp_path / "a.yaml").write_text("---\n".join([*PODS_EACH, deny]))
    (tmp_path / "b.yaml").write_text(global_policy("c", "Allow", "all()"))
    found = FilePolicies(tmp_path)
    before = found.read()
    (tmp_path / "a.yaml").write_text("---\n".join(PODS_EACH))
    (tmp_path / "b.yaml").write_text("---\n".join([global_policy("c", "Allow", "all()"), deny + "x: ["]))
    assert found.read() == before
    (tmp_path / "b.yaml").write_text(global_policy("c", "Allow", "all()"))
    assert c.PolicyId("GlobalNetworkPolicy", "", "b") not in found.read().policies


def test_two_forms_of_an_object_in_a_file_leave_its_last_good_form(tmp_path: Path) -> None:
    first, second = (global_policy("a", action, "all()") for action in ("Deny", "Allow"))
    (tmp_path / "a.yaml").write_text("---\n".join([*PODS_EACH, first]))
    found = FilePolicies(tmp_path)
    before = found.read()
    (tmp_path / "a.yaml").write_text("---\n".join([*PODS_EACH, second, first]))
    assert found.read() == before
    assert "GlobalNetworkPolicy/a: is repeated" in found.faults[0]
    assert not FilePolicies(tmp_path).complete


def test_a_folder_that_is_away_leaves_the_last_policies(tmp_path: Path) -> None:
    folder = tmp_path / "policies"
    folder.mkdir()
    (folder / "a.yaml").write_text("---\n".join([*PODS_EACH, global_policy("a", "Allow", "all()")]))
    found = FilePolicies(folder)
    before = found.read()
    folder.rename(tmp_path / "away")
    assert found.read() == before
    assert found.faults == (f"{folder}: No such file or directory",)
    (tmp_path / "away").rename(folder)
    assert found.read() == before
    assert found.faults == ()


def test_updates_of_compiled_policies_fill_a_store_completely(tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text(PODS + "---" + POLICY.format(action="Allow"))
    compiled = compile_resources(read_files([tmp_path]))
    evaluator = Evaluator(Store())
    for update in updates_of(compiled):
        evaluator.apply(update)
    store = evaluator.store
    assert (store.policies, store.profiles, store.endpoints) == (
        compiled.policies,
        compiled.profiles,
        compiled.endpoints,
    )
    assert (store.service_accounts, store.namespaces) == (compiled.accounts, compiled.namespaces)
    assert len(store.ip_sets) == len(compiled.ip_sets)
    assert store.endpoint_at("10.0.0.2") is not None
    assert store.endpoints[c.EndpointId("k8s", "shop/db", "eth0")].addresses == (ip_network("10.0.0.2"),)


@pytest.mark.parametrize("before", ["''", "null", "~", "default"])
@pytest.mark.parametrize("after", ["''", "null", "default"])
def test_namespace_written_another_way_leaves_the_policy(tmp_path: Path, before: str, after: str) -> None:
    policy = "{{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {{name: a, namespace: {}}}}}"
    file = tmp_path / "policy.yaml"
    policies = FilePolicies(tmp_path)
    wanted = [c.PolicyId("KubernetesNetworkPolicy", "default", "a")]
    for namespace in (before, after):
        file.write_text(f"{policy.format(namespace)} # {namespace}\n")
        assert list(policies.read().policies) == wanted


def test_namespace_that_is_no_text_is_a_fault_and_closes_that_namespace(tmp_path: Path) -> None:
    text = "{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: a, namespace: 123}, spec: {}}"
    (tmp_path / "policy.yaml").write_text(text)
    policies = FilePolicies(tmp_path)
    [(policy_id, policy)] = policies.read().policies.items()
    assert policy_id.namespace == "123"
    assert [rule.action for rule in policy.inbound + policy.outbound] == ["deny", "deny"]
    assert "metadata.namespace must be text, not 123" in policies.faults[0]
    with pytest.raises(Faults, match=r"metadata\.namespace must be text, not 123"):
        read_files([tmp_path])


def test_emptied_file_keeps_its_policies_until_it_is_written_or_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY.format(action="Allow"))
    policies = FilePolicies(tmp_path)
    wanted = policies.read().policies
    for _ in range(2):
        file.write_text("")
        assert policies.read().policies == wanted
        assert "policy.yaml: is empty" in policies.faults[0]
        file.write_text("{")
        assert policies.read().policies == wanted
    assert "what has disappeared stays as it was: GlobalNetworkPolicy/to-db" in caplog.text
    file.write_text(POLICY.format(action="Deny"))
    assert policies.read().policies.keys() == wanted.keys()
    assert policies.read().policies != wanted
    file.write_text("# no policies\n")
    assert policies.read().policies == {}
    assert policies.faults == ()
