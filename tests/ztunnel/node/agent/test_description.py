"""The file of pods: its values, and every fault with its place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tproxy.inpod import Capture
from ztunnel.node.agent.description import PodDescription, PodFaults, parse_pods
from ztunnel.proxy.istio.zds.pods import PodInfo

GOOD = """
pods:
  productpage: {netns: cni-1}
  bookinfo/reviews:
    pid: 4711
    service_account: bookinfo-reviews
    uid: 0b2c
    dns: false
    inbound: false
    virtual_interfaces: [tap0, docker0]
    new_connections_only: true
"""


def faults(text: str) -> list[str]:
    with pytest.raises(PodFaults) as caught:
        parse_pods(text)
    return caught.value.faults


def test_everything_that_can_be_said() -> None:
    plain, full = parse_pods(GOOD)
    assert plain == PodDescription(
        uid="default/productpage",  # type: ignore[arg-type]
        info=PodInfo(name="productpage", namespace="default", service_account="default"),
        netns="cni-1",
    )
    assert (full.uid, full.netns) == ("0b2c", 4711)
    assert full.info == PodInfo(name="reviews", namespace="bookinfo", service_account="bookinfo-reviews")
    assert full.capture((4,), draining=True) == Capture(
        versions=(4,),
        dns=False,
        inbound=False,
        virtual_interfaces=("tap0", "docker0"),
        new_connections_only=True,
        draining=True,
    )
    assert plain.capture((4, 6)) == Capture()


@pytest.mark.parametrize("text", ["", "pods:", "pods: {}"])
def test_no_pods_is_a_description_too(text: str) -> None:
    assert parse_pods(text) == ()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[]", "file: must be a mapping, not []"),
        ("podz: {}", "file.podz: unknown; known are pods"),
        ("pods: {a: {}}", "pods.a: needs netns or pid, and not both"),
        ("pods: {a: {netns: x, pid: 1}}", "pods.a: needs netns or pid, and not both"),
        ("pods: {a: {netns: 7}}", "pods.a.netns: must be a name or a path, not 7"),
        ("pods: {a: {netns: ''}}", "pods.a.netns: must be a name or a path, not ''"),
        ("pods: {a: {pid: true}}", "pods.a.pid: must be a process id, not True"),
        ("pods: {a: {pid: 0}}", "pods.a.pid: must be a process id, not 0"),
        ("pods: {a: {netns: x, sa: y}}", "pods.a.sa: unknown; known are netns, pid, service_account,"),
        ("pods: {a: {netns: x, dns: 1}}", "pods.a.dns: must be true or false, not 1"),
        ("pods: {a: {netns: x, uid: ''}}", "pods.a.uid: must not be empty"),
        ("pods: {a: {netns: x, uid: 5}}", "pods.a.uid: must be text, not 5"),
        ("pods: {a: {netns: x, service_account: a/b}}", "pods.a.service_account: must be letters, digits,"),
        ("pods: {a b: {netns: x}}", "pods.a b: must be letters, digits,"),
        ("pods: {/a: {netns: x}}", "pods./a: must be letters, digits,"),
        ("pods: {a/b/c: {netns: x}}", "pods.a/b/c: must be letters, digits,"),
        ("pods: {a: {netns: x, virtual_interfaces: tap0}}", "pods.a.virtual_interfaces: must be a list, not"),
        ("pods: {a: {netns: x, virtual_interfaces: [a/b]}}", "pods.a.virtual_interfaces: must be the name of"),
        (
            "pods: {a: {netns: x, virtual_interfaces: [sixteen-letters-]}}",
            "pods.a.virtual_interfaces: must be the",
        ),
    ],
)
def test_a_fault_is_told_with_its_place(text: str, fault: str) -> None:
    [told] = faults(text)
    assert told.startswith(fault)


def test_all_faults_are_told_together() -> None:
    assert len(faults("pods: {a: {netns: 7, dns: x}, b: {}, c: {netns: x}}\nother: 1")) == 4


def test_what_must_be_unique_is() -> None:
    assert faults("pods: {a: {netns: x, uid: u}, b: {netns: y, uid: u}}") == ["pods.b.uid: is default/a's already"]
    assert faults("pods: {a: {netns: x}, b: {netns: x}}") == ["pods.b.netns: is default/a's already"]


def test_names_that_no_message_could_carry_are_refused() -> None:
    assert "too long" in faults(f"pods: {{{'a' * 600}: {{netns: x, uid: {'b' * 600}}}}}")[0]


def test_what_is_not_yaml_is_a_fault() -> None:
    assert len(faults("pods: [")) == 1


@given(st.text(max_size=60))
def test_any_text_is_a_description_or_faults(text: str) -> None:
    try:
        parse_pods(text)
    except PodFaults as error:
        assert error.faults  # noqa: PT017 - both ways are right, and which it is hypothesis cannot know
