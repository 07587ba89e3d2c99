"""Names of a hosts file: as hosts(5) has them, also when the file changes or cannot be read."""

import ipaddress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ztunnel.proxy.istio.dns.hosts import Hosts, entries

KUBELETS = """\
# Kubernetes-managed hosts file.
127.0.0.1\tlocalhost
::1\tlocalhost ip6-localhost ip6-loopback
fe00::0\tip6-localnet
10.244.1.7\tztunnel-x

# Entries added by HostAliases.
192.0.2.7\tdb.example.com\tDB2.Example.com. # the old one
192.0.2.8\tdb.example.com
2001:db8::7\tdb.example.com
"""


def found(hosts: Hosts, name: str, *, ipv6: bool = False) -> list[str]:
    return [str(address) for address in hosts.addresses(name, ipv6=ipv6)]


def test_hosts_file_of_kubelet_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(KUBELETS)
    hosts = Hosts(path)
    assert found(hosts, "db.example.com") == ["192.0.2.7", "192.0.2.8"]
    assert found(hosts, "DB.example.COM", ipv6=True) == ["2001:db8::7"]
    assert found(hosts, "db2.example.com") == ["192.0.2.7"]
    assert found(hosts, "db2.example.com", ipv6=True) == []
    assert found(hosts, "ztunnel-x") == ["10.244.1.7"]
    assert found(hosts, "the") == []


@pytest.mark.parametrize("text", ["", "192.0.2.1 localhost a.localhost\n"])
def test_localhost_is_always_loopback(tmp_path: Path, text: str) -> None:
    (tmp_path / "hosts").write_text(text)
    hosts = Hosts(tmp_path / "hosts")
    for name in ("localhost", "LOCALHOST", "a.localhost"):
        assert found(hosts, name) == ["127.0.0.1"]
        assert found(hosts, name, ipv6=True) == ["::1"]
    assert found(hosts, "notlocalhost") == []


def test_changed_hosts_file_is_reloaded_and_kept_while_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    hosts = Hosts(path)
    assert found(hosts, "a") == []
    path.write_text("192.0.2.1 a\n")
    assert found(hosts, "a") == ["192.0.2.1"]
    new = tmp_path / "new"
    new.write_text("192.0.2.22 a\n")
    new.rename(path)
    assert found(hosts, "a") == ["192.0.2.22"]
    path.unlink()
    path.mkdir()  # cannot be read as a file, and is no absence
    assert found(hosts, "a") == ["192.0.2.22"]
    path.rmdir()
    assert found(hosts, "a") == []


@given(st.text())
def test_any_hosts_file_is_parsed(text: str) -> None:
    for name, addresses in entries(text).items():
        assert addresses
        assert name == name.lower()
        assert all(isinstance(each, ipaddress.IPv4Address | ipaddress.IPv6Address) for each in addresses)
