"""A lab's error where no network namespace can be created."""

import errno

import pytest

from deploy import lab
from tproxy.errors import KernelRefused, NeedCapability, TproxyError


@pytest.mark.parametrize(
    "refusal",
    [
        KernelRefused("make a namespace", errno.ENOSPC),  # user.max_user_namespaces=0
        NeedCapability("CAP_SYS_ADMIN", "make a namespace"),
        PermissionError(errno.EPERM, "Operation not permitted"),
    ],
)
def test_a_user_who_may_make_no_namespaces_reads_what_to_do(
    refusal: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unshare(flags: int) -> None:
        raise refusal

    monkeypatch.setattr(lab, "may_make_namespaces", lambda: False)
    monkeypatch.setattr(lab, "unshare", unshare)
    with pytest.raises(TproxyError, match=r"^[^\n]*root[^\n]*sysctl user\.max_user_namespaces=10000[^\n]*$"):
        lab.become_root_of_own_namespaces()
