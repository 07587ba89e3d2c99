"""Facts of a kernel, from files as kernels write them."""

from pathlib import Path

from ztunnel.runtime.kernel_facts import kernel_facts

TCP = (
    "  sl  local_address rem_address   st tx_queue\n"
    "   0: 00000000:3A98 00000000:0000 0A 00000000\n"
    "   1: 0100007F:1F90 0100007F:8000 01 00000000\n"
)


def test_what_files_say(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    files = {
        "sys/net/ipv4/ip_forward": "1\n",
        "sys/net/ipv4/conf/all/rp_filter": "2\n",
        "sys/net/ipv4/conf/lo/rp_filter": "0\n",
        "sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
        "sys/net/ipv4/ip_local_reserved_ports": "15000-15090\n",
        "sys/net/netfilter/nf_conntrack_count": "7\n",
        "self/net/tcp": TCP,
        "self/net/sockstat": "sockets: used 9\nTCP: inuse 3 orphan 0 tw 5 alloc 4 mem 1\n",
        "self/status": "Name:\tx\nVmRSS:\t  2048 kB\nCapEff:\t0000000000003000\n",
        "self/cgroup": "0::/pod/x\n",
    }
    for name, text in files.items():
        (proc / name).parent.mkdir(parents=True, exist_ok=True)
        (proc / name).write_text(text)
    (cgroups / "pod/x").mkdir(parents=True)
    (cgroups / "cgroup.controllers").write_text("cpu memory\n")
    (cgroups / "pod/x/cpu.stat").write_text("usage_usec 5\nnr_periods 100\nnr_throttled 7\n")
    found = kernel_facts(proc, cgroups)
    assert found["ipForward"] == 1
    assert found["rpFilter"] == {"all": 2, "lo": 0}
    assert found["localPortRange"] == [32768, 60999]
    assert found["reservedPorts"] == "15000-15090"
    assert found["conntrack"] == {"count": 7, "maximum": None}
    assert found["listening"] == [15000]
    assert found["sockets"]["tw"] == 5
    assert found["cgroupVersion"] == 2
    process = found["process"]
    assert (process["memoryBytes"], process["capabilities"]) == (2048 * 1024, "0000000000003000")
    assert process["throttling"] == {"periods": 100, "throttled": 7}


def test_files_that_are_missing_are_no_facts(tmp_path: Path) -> None:
    found = kernel_facts(tmp_path, tmp_path)
    assert found["ipForward"] is None
    assert found["conntrack"] == {"count": None, "maximum": None}
    assert found["listening"] == []
    assert found["process"]["capabilities"] is None
