"""Sockets that the kernel does not make: what callers get, and what stays open."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tproxy.aio import sockets
from tproxy.errors import KernelRefused

MAKERS: dict[str, Callable[[], Any]] = {
    "listen": lambda: sockets.listen("::", 0),
    "datagrams": lambda: sockets.datagrams("::1", 0),
    "unbound": lambda: sockets.unbound(socket.AF_INET6, socket.SOCK_DGRAM),
    "connect": lambda: asyncio.run(sockets.connect(("::1", 1))),
    "prepared": lambda: sockets.prepared(2, 6),
}


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Open no further file: the kernel answers EMFILE."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "connect"])
def test_without_descriptors_the_kernels_refusal_is_named(name: str) -> None:
    with no_descriptors(), pytest.raises(KernelRefused) as refused:
        MAKERS[name]()
    assert refused.value.code == errno.EMFILE


@pytest.mark.parametrize("name", MAKERS)
def test_a_kernel_without_ipv6_refuses_its_sockets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``ipv6.disable=1`` socket(2) itself fails, not bind(2)."""

    class Kernel(socket.SocketType):
        def __init__(self, family: int, *arguments: int, **named: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
            super().__init__(family, *arguments, **named)

    monkeypatch.setattr(socket, "socket", Kernel)
    monkeypatch.setattr(socket, "SocketType", Kernel)
    with pytest.raises(KernelRefused) as refused:
        MAKERS[name]()
    assert refused.value.code == errno.EAFNOSUPPORT
