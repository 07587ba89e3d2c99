"""Which pods are in the mesh, and the steps there and back, as tables and for any state that hypothesis finds."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ztunnel.node.agent.enrolment import (
    BYPASS_INBOUND,
    DNS_CAPTURE,
    MODE,
    REDIRECTION,
    SIDECAR,
    VIRTUAL_INTERFACES,
    Misshapen,
    Pod,
    Reason,
    Settings,
    Situation,
    Step,
    decide,
    describe,
    kept,
    read_pod,
    step,
)
from ztunnel.node.agent.phase import Phase
from ztunnel.proxy.istio.zds.pods import PodInfo, PodUid

AMBIENT = {MODE: "ambient"}


def pod(namespace: str = "shop", **fields: Any) -> Pod:
    info = PodInfo(name="web", namespace=namespace, service_account="default")
    return Pod(uid=PodUid("u"), info=info, **fields)


@pytest.mark.parametrize(
    ("asked", "namespace", "wanted", "reason"),
    [
        (pod(), AMBIENT, True, Reason.NAMESPACE_IN),
        (pod(), {}, False, Reason.NOT_ASKED),
        (pod(), None, False, Reason.NAMESPACE_UNKNOWN),
        (pod(labels={MODE: "none"}), None, False, Reason.POD_OUT),
        (pod(host_network=True), None, False, Reason.HOST_NETWORK),
        (pod(labels=AMBIENT), None, True, Reason.POD_IN),
        (pod(labels={MODE: "none"}), AMBIENT, False, Reason.POD_OUT),
        (pod(labels={MODE: "Ambient"}), AMBIENT, True, Reason.NAMESPACE_IN),
        (pod(labels={MODE: "other"}), {}, False, Reason.NOT_ASKED),
        (pod(host_network=True, labels=AMBIENT), AMBIENT, False, Reason.HOST_NETWORK),
        (pod(annotations={SIDECAR: ""}, labels=AMBIENT), AMBIENT, False, Reason.SIDECAR),
        (pod("kube-system", labels=AMBIENT), AMBIENT, False, Reason.EXCLUDED_NAMESPACE),
        (pod("istio-system", labels={"app": "ztunnel"}), AMBIENT, False, Reason.PROXY),
        (pod("istio-system", labels={"app": "kiali"}), AMBIENT, True, Reason.NAMESPACE_IN),
        (pod("shop", labels={"app": "ztunnel"}), AMBIENT, True, Reason.NAMESPACE_IN),
        (pod(ended=True), AMBIENT, False, Reason.ENDED),
    ],
)
def test_pods_are_in_the_mesh_by_labels_and_annotations(
    asked: Pod, namespace: dict[str, str] | None, wanted: bool, reason: Reason
) -> None:
    decision = decide(asked, namespace, Settings())
    assert (decision.enrol, decision.reason) == (wanted, reason)


modes = st.sampled_from([{}, AMBIENT, {MODE: "none"}, {MODE: "x"}])
pods = st.builds(
    pod,
    st.sampled_from(["shop", "kube-system", "istio-system"]),
    labels=st.builds(lambda mode, app: {**mode, **app}, modes, st.sampled_from([{}, {"app": "ztunnel"}])),
    annotations=st.sampled_from([{}, {SIDECAR: "{}"}, {REDIRECTION: "enabled"}]),
    host_network=st.booleans(),
    ended=st.booleans(),
)


@given(pods, st.none() | modes)
def test_exactly_the_pods_that_ask_and_can_are_in(asked: Pod, namespace: dict[str, str] | None) -> None:
    decision = decide(asked, namespace, Settings())
    spaces = (namespace or {}).get(MODE) == "ambient" and asked.labels.get(MODE) != "none"
    wanted = asked.labels.get(MODE) == "ambient" or spaces
    barred = (
        asked.host_network
        or asked.ended
        or SIDECAR in asked.annotations
        or asked.info.namespace == "kube-system"
        or (asked.info.namespace == "istio-system" and asked.labels.get("app") == "ztunnel")
    )
    assert decision.enrol == (wanted and not barred)
    # The agent's own annotation is status, never intent.
    bare = replace(
        asked, annotations={key: value for key, value in asked.annotations.items() if key != REDIRECTION}
    )
    assert decide(bare, namespace, Settings()) == decision


@pytest.mark.parametrize(
    ("at", "wanted"),
    [
        (Situation(enrol=True), Step.ENROL),
        (Situation(enrol=True, reachable=False), Step.NOTHING),
        (Situation(enrol=True, annotation="enabled"), Step.ENROL),
        (Situation(enrol=True, annotation="enabled", failing=True), Step.SAY_OUT),
        (Situation(enrol=True, failing=True), Step.ENROL),
        (Situation(enrol=True, phase=Phase.PENDING), Step.SAY_PENDING),
        (Situation(enrol=True, phase=Phase.PENDING, annotation="pending"), Step.NOTHING),
        (Situation(enrol=True, phase=Phase.PENDING, annotation="enabled"), Step.NOTHING),
        (Situation(enrol=True, phase=Phase.ENABLED), Step.SAY_ENABLED),
        (Situation(enrol=True, phase=Phase.ENABLED, annotation="forged"), Step.SAY_ENABLED),
        (Situation(enrol=True, phase=Phase.ENABLED, annotation="enabled"), Step.NOTHING),
        (Situation(enrol=True, phase=Phase.ENABLED, annotation="enabled", current=False), Step.ENROL),
        (Situation(enrol=True, phase=Phase.LEAVING), Step.ENROL),
        (Situation(enrol=False), Step.NOTHING),
        (Situation(enrol=False, undecided=True, annotation="enabled", phase=Phase.ENABLED), Step.NOTHING),
        (Situation(enrol=False, undecided=True, annotation="enabled", left_over=True), Step.NOTHING),
        (Situation(enrol=False, undecided=True, ended=True, left_over=True), Step.DROP),
        (Situation(enrol=False, annotation="enabled", phase=Phase.ENABLED), Step.SAY_OUT),
        (Situation(enrol=False, phase=Phase.ENABLED), Step.RELEASE),
        (Situation(enrol=False, left_over=True), Step.RELEASE),
        (Situation(enrol=False, phase=Phase.LEAVING), Step.NOTHING),
        (Situation(enrol=False, ended=True, phase=Phase.LEAVING), Step.DROP),
        (Situation(enrol=False, ended=True, left_over=True, annotation="enabled"), Step.DROP),
        (Situation(enrol=False, ended=True, annotation="enabled"), Step.SAY_OUT),
        (Situation(enrol=False, ended=True), Step.NOTHING),
    ],
)
def test_the_next_step(at: Situation, wanted: Step) -> None:
    assert step(at) is wanted


def taken(at: Situation, what: Step, proxy: bool) -> Situation:
    match what:
        case Step.ENROL:
            phase = Phase.ENABLED if proxy else Phase.PENDING
            return replace(at, phase=phase, current=True, left_over=False, failing=False)
        case Step.SAY_ENABLED:
            return replace(at, annotation="enabled")
        case Step.SAY_PENDING:
            return replace(at, annotation="pending")
        case Step.SAY_OUT:
            return replace(at, annotation=None)
        case Step.RELEASE | Step.DROP:
            return replace(at, phase=None, left_over=False)
        case _:
            return at


@given(
    st.builds(
        Situation,
        enrol=st.booleans(),
        ended=st.booleans(),
        reachable=st.booleans(),
        annotation=st.sampled_from([None, "enabled", "pending", "forged"]),
        phase=st.sampled_from([None, *Phase]),
        left_over=st.booleans(),
        current=st.booleans(),
        failing=st.booleans(),
    ),
    st.booleans(),
)
def test_steps_lead_to_what_is_wanted_and_stop(at: Situation, proxy: bool) -> None:
    at = replace(at, enrol=at.enrol and not at.ended)
    for _ in range(5):
        what = step(at)
        if what is Step.RELEASE:
            # Never before peers know: the proxy still takes their tunnels.
            assert at.annotation is None
        if what is Step.NOTHING:
            break
        at = taken(at, what, proxy)
    assert step(at) is Step.NOTHING
    if at.enrol and at.reachable:
        assert at.phase in (Phase.ENABLED, Phase.PENDING)
        assert at.annotation in ("enabled", "pending")
        assert at.annotation == "enabled" or at.phase is Phase.PENDING
    elif not at.enrol:
        assert at.phase in (None, Phase.LEAVING)
        assert at.annotation is None


def api_pod(**status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "web", "namespace": "shop", "uid": "u-1", "annotations": {REDIRECTION: "enabled"}},
        "spec": {"serviceAccountName": "till", "containers": [{"name": "app"}]},
        "status": status,
    }


def test_a_pod_is_read_with_all_its_addresses() -> None:
    value = api_pod(
        phase="Running", podIP="10.0.0.1", podIPs=[{"ip": "10.0.0.1"}, {"ip": "fd00::1"}, {"ip": 7}, 1]
    )
    found = read_pod(value)
    assert {str(address) for address in found.addresses} == {"10.0.0.1", "fd00::1"}
    assert (found.info.service_account, found.annotation, found.ended) == ("till", "enabled", False)
    assert read_pod(kept(value)) == found
    assert read_pod(api_pod(phase="Succeeded")).ended


def test_a_static_pod_is_known_by_its_kubelets_name_too() -> None:
    value = api_pod()
    value["metadata"]["annotations"] = {"kubernetes.io/config.hash": "abc"}
    assert read_pod(value).ids == {"u-1", "abc"}


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [({"name": "web"}, "no name or namespace"), ({"name": "w", "namespace": "s"}, "no uid"), (7, "no name"),
     ({"name": "w" * 2000, "namespace": "s", "uid": "u"}, "too long")],
)  # fmt: skip
def test_what_is_no_pod_is_refused(metadata: object, reason: str) -> None:
    with pytest.raises(Misshapen, match=reason):
        read_pod({"metadata": metadata})


def test_annotations_choose_what_is_captured_and_bad_ones_are_ignored() -> None:
    plain, ignored = describe(pod(), "ns", Settings())
    assert (plain.dns, plain.inbound, plain.virtual_interfaces, plain.new_connections_only) == (
        True,
        True,
        (),
        True,
    )
    assert ignored == []
    chosen = {BYPASS_INBOUND: "T", DNS_CAPTURE: "0", VIRTUAL_INTERFACES: "tap0, br/1,tap0,"}
    found, ignored = describe(pod(annotations=chosen), "ns", Settings(new_connections_only=False))
    assert (found.dns, found.inbound, found.virtual_interfaces) == (False, False, ("tap0",))
    assert not found.new_connections_only
    assert [VIRTUAL_INTERFACES in line for line in ignored] == [True, True]
    odd, ignored = describe(pod(annotations={DNS_CAPTURE: "yes", BYPASS_INBOUND: 1}), "ns", Settings(dns=False))
    assert (odd.dns, odd.inbound) == (False, True)
    assert "must be true or false, not 'yes'" in ignored[0]
