"""Errors of opening network namespaces."""

import errno
import os

import pytest

from tproxy.aio.netns import Netns
from tproxy.errors import KernelRefused, UnknownNamespace


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_shortage_is_not_reported_as_a_missing_namespace(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(path: str, flags: int) -> int:
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(KernelRefused, match=errno.errorcode[code]):
        Netns.open("/run/netns/pod")


@pytest.mark.parametrize("where", ["/nowhere/pod", "/dev/null/pod", "n" * 300, 2**22 + 1])
def test_a_name_path_or_process_that_does_not_exist_is_unknown(where: str | int) -> None:
    with pytest.raises(UnknownNamespace):
        Netns.open(where)
