"""Adds addresses to the device ``lo`` of a namespace, and removes them. Both calls block, like every netlink
request.
"""

import errno
from ipaddress import ip_interface

from tproxy.aio import rtnetlink
from tproxy.aio.netlink import NETLINK_ROUTE, NetlinkSocket
from tproxy.aio.netns import Netns
from tproxy.errors import KernelRefused, NeedCapability, UnknownInterface
from tproxy.resources import Address, IpAddress

_LO = "lo"


def put_address(address: IpAddress, netns: Netns | None = None) -> bool:
    """Add a host address to ``lo``; idempotent.

    Returns:
        False if the address existed.

    Raises:
        NeedCapability: CAP_NET_ADMIN is missing.
        KernelRefused: EACCES or EINVAL if the namespace has no IPv6.
    """
    return _change(rtnetlink.RTM_NEWADDR, address, netns, errno.EEXIST)


def remove_address(address: IpAddress, netns: Netns | None = None) -> bool:
    """Remove a host address from ``lo``; idempotent.

    Returns:
        False if the address did not exist.

    Raises:
        NeedCapability: CAP_NET_ADMIN is missing.
    """
    return _change(rtnetlink.RTM_DELADDR, address, netns, errno.EADDRNOTAVAIL)


def _change(kind: int, address: IpAddress, netns: Netns | None, already: int) -> bool:
    route = NetlinkSocket(NETLINK_ROUTE, netns)
    try:
        links = [rtnetlink.read_link(body) for body in route.dump(rtnetlink.dump_request(rtnetlink.RTM_GETLINK))]
        index = next((link.index for link in links if link.name == _LO), None)
        if index is None:
            raise UnknownInterface(_LO, "this")
        route.request(rtnetlink.address_message(kind, Address(_LO, ip_interface(address)), index))
    except KernelRefused as error:
        if error.code == already:
            return False
        raise
    except NeedCapability as error:
        raise NeedCapability(error.capability, f"change addresses of {_LO}") from error
    finally:
        route.close()
    return True
