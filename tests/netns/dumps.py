"""Everything a namespace's kernel state consists of, ours or not, for "before equals after"."""

from pathlib import Path

from tproxy.aio import rtnetlink
from tproxy.aio.netlink import NETLINK_NETFILTER, NETLINK_ROUTE, NetlinkSocket
from tproxy.aio.netns import Netns
from tproxy.render import nftables


def everything(netns: Netns) -> dict[str, object]:
    with NetlinkSocket(NETLINK_ROUTE, netns) as route, NetlinkSocket(NETLINK_NETFILTER, netns) as nft:
        links = [rtnetlink.read_link(body) for body in route.dump(rtnetlink.dump_request(rtnetlink.RTM_GETLINK))]
        state: dict[str, object] = {"links": sorted((link.name, link.up, link.kind) for link in links)}
        for name, kind in (("rules", rtnetlink.RTM_GETRULE), ("routes", rtnetlink.RTM_GETROUTE)):
            state[name] = sorted(
                body[:12].hex() + _stable(body[12:]) for body in route.dump(rtnetlink.dump_request(kind))
            )
        for name, kind in (
            ("tables", nftables.NFT_GETTABLE),
            ("chains", nftables.NFT_GETCHAIN),
            ("rules of chains", nftables.NFT_GETRULE),
            ("sets", nftables.NFT_GETSET),
        ):
            state[name] = sorted(nft.dump(nftables.nft_message(kind, 0, nftables.DUMP)))
    with netns.entered():
        state["sysctls"] = {
            str(path): path.read_text()
            for version in ("ipv4", "ipv6")
            for path in sorted(Path(f"/proc/sys/net/{version}/conf").glob("*/*"))
            if path.name != "stable_secret"
        }
    return state


def _stable(attributes: bytes) -> str:
    from tproxy.wire import attribute_map

    # RTA_CACHEINFO (12) counts time and uses.
    return repr(sorted((key, value) for key, value in attribute_map(attributes).items() if key != 12))


def without_generation(state: dict[str, object]) -> dict[str, object]:
    """Return the state without the generation counter of nftables, which is in bytes 2 and 3 of its messages."""
    return {
        part: [body[:2] + body[4:] if isinstance(body, bytes) else body for body in value]
        if isinstance(value, list)
        else value
        for part, value in state.items()
    }
