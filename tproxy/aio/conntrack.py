"""Deletes the conntrack entries of unwanted connections."""

import errno
from collections.abc import Callable

from tproxy.aio.netlink import NETLINK_NETFILTER, NetlinkSocket
from tproxy.aio.netns import Netns
from tproxy.conntrack import Flow, delete_request, dump_request, read_flow
from tproxy.errors import KernelRefused, MissingFeature


def forget_flows(unwanted: Callable[[Flow], bool], netns: Netns | None = None) -> list[Flow]:
    """Delete the conntrack entries of unwanted connections, and return these entries. This call blocks.

    nftables then treats the next packet of each deleted connection as the first of a new connection.

    Raises:
        MissingFeature: the kernel has no ctnetlink.
        TproxyError: any other refusal.
    """
    with NetlinkSocket(NETLINK_NETFILTER, netns) as link:
        try:
            flows = [read_flow(body) for body in link.dump(dump_request())]
        except KernelRefused as error:
            if error.code in (errno.EINVAL, errno.EOPNOTSUPP):
                raise MissingFeature("to end connections", "nf_conntrack_netlink") from error
            raise
        gone = []
        for flow in filter(unwanted, flows):
            try:
                link.request(delete_request(flow))
            except KernelRefused as error:
                if error.code != errno.ENOENT:
                    raise
            else:
                gone.append(flow)
        return gone
