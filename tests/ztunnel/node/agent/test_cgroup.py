"""The forms in which kubelets and container runtimes name a pod in a cgroup."""

import pytest

from ztunnel.node.agent.cgroup import pod_of

UID = "2b1c7f0e-8a4d-4d5c-9c1a-0f6e2a7b3c4d"
WITH_BARS = UID.replace("-", "_")
STATIC = "0123456789abcdef0123456789abcdef"
BOX = "e" * 64


@pytest.mark.parametrize(
    ("text", "pod"),
    [
        (f"0::/kubepods/besteffort/pod{UID}/{BOX}", UID),
        (f"0::/kubepods/pod{UID}/{BOX}", UID),
        (f"12:pids:/kubepods/burstable/pod{UID}/{BOX}\n1:name=systemd:/kubepods/burstable/pod{UID}/{BOX}", UID),
        (
            f"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{WITH_BARS}.slice/"
            f"cri-containerd-{BOX}.scope",
            UID,
        ),
        (f"0::/kubepods.slice/kubepods-pod{WITH_BARS}.slice/crio-{BOX}.scope", UID),
        (f"0::/../../kubepods-besteffort-pod{WITH_BARS}.slice/cri-containerd-{BOX}.scope", UID),
        (f"0::/system.slice/kubelet.slice/kubelet-kubepods-pod{WITH_BARS}.slice:cri-containerd:{BOX}", UID),
        (f"0::/kubepods/burstable/pod{STATIC}/{BOX}", STATIC),
        (f"0::/kubelet/kubepods/pod{UID}/{BOX}/docker/{BOX}/init", UID),
        (f"0::/kubepods.slice/kubepods-pod{WITH_BARS}.slice/crio-{BOX}/pod{STATIC}/x", UID),
        (f"1:cpu:/kubepods/pod{UID}/{BOX}\n2:pids:/kubepods/pod{STATIC}/{BOX}", None),
        ("0::/system.slice/containerd.service", None),
        ("0::/user.slice/podman-1.scope", None),
        (f"0::/kubepods/pod{UID}x/{BOX}", None),
        ("", None),
        ("no colon", None),
    ],
)
def test_the_pod_of_a_cgroup(text: str, pod: str | None) -> None:
    assert pod_of(text) == pod
