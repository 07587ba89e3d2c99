"""``ztunnel init``. Exit status: 0 done; 1 the kernel refuses; 2 bad flags; 126 traffic is not captured."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from tproxy.resources import Version
    from ztunnel.sidecar.init.flags import Wanted

DONE, FAILED, BAD_FLAGS, NOT_CAPTURED = 0, 1, 2, 126
_RESOLV_CONF: Final = Path("/etc/resolv.conf")
_LO_WITHOUT_IPV6: Final = Path("/proc/sys/net/ipv6/conf/lo/disable_ipv6")


def add_arguments(subparsers: Any) -> None:
    """Add ``init`` to ``argparse``'s sub-commands; ``args.run`` becomes :func:`run`."""
    from ztunnel.sidecar.init.flags import add_flags

    text = "redirect this pod's traffic to the proxy in the pod (the init container of a sidecar)"
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "init", help=text, description=f"{text}. The flags are those of istio-iptables. It can be repeated."
    )
    add_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, out: TextIO | None = None, err: TextIO | None = None) -> int:
    """Run a parsed command line, and return the exit status; errors are printed, not raised."""
    from tproxy.aio.netns import Netns
    from tproxy.errors import TproxyError
    from ztunnel.sidecar.init.flags import BadFlags, resolvers_of, wanted

    out = out if out is not None else sys.stdout
    err = err if err is not None else sys.stderr
    try:
        where = Netns.open(args.network_namespace) if args.network_namespace else None
        try:
            parsed = wanted(
                args, os.environ, versions=_versions(where), resolvers=resolvers_of(_read(_RESOLV_CONF))
            )
            for note in parsed.notes:
                print(f"ztunnel init: {note}", file=err)
            return _carry_out(parsed, where, out)
        finally:
            if where is not None:
                where.close()
    except BadFlags as error:
        for fault in error.faults:
            print(f"ztunnel init: {fault}", file=err)
        return BAD_FLAGS
    except TproxyError as error:
        print(f"ztunnel init: {error}", file=err)
        return FAILED


def _carry_out(wanted: "Wanted", where: Any, out: TextIO) -> int:
    from tproxy.aio.netns import entered
    from tproxy.render.iptables import restore_text
    from tproxy.render.text import table_text
    from tproxy.sidecar import sidecar
    from ztunnel.sidecar.init.validation import validate

    if wanted.show:
        if wanted.show == "nft":
            print(table_text(sidecar(wanted.sidecar)), file=out)
        else:
            for version in wanted.sidecar.versions:
                program = "iptables-restore" if version == 4 else "ip6tables-restore"
                print(f"# {program} --noflush\n{restore_text(wanted.sidecar, version)}", end="", file=out)
        return DONE
    if wanted.apply or wanted.remove:
        changes = _change(wanted, where)
        print(f"{changes} changes" if changes else "nothing to change", file=out)
    if wanted.validate:
        with entered(where):
            captured = validate(
                wanted.sidecar,
                wanted.probe_port,
                wanted.probe_timeout_s,
                lambda line: print(line, file=out, flush=True),
                user=os.geteuid(),
                group=os.getegid(),
            )
        return DONE if captured else NOT_CAPTURED
    return DONE


def _change(wanted: "Wanted", where: Any) -> int:
    """Make the table equal to the desired one, and add the address ``::6`` to ``lo``. Return the number of
    changes.

    Raises:
        TproxyError: the kernel refuses. The previous state is unchanged.
    """
    from tproxy.aio.loopback import put_address, remove_address
    from tproxy.aio.table import BlockingTable
    from tproxy.sidecar import PASSTHROUGH, TABLE, sidecar

    changes = 0
    # The address is added first. Without it, the rules would redirect the proxy's own connections to the
    # application.
    if 6 in wanted.sidecar.versions and not wanted.remove:
        changes += put_address(PASSTHROUGH[6], where)
    table = BlockingTable(TABLE, where)
    try:
        changes += len(table.apply(None if wanted.remove else sidecar(wanted.sidecar)))
    finally:
        table.close()
    if 6 in wanted.sidecar.versions and wanted.remove:
        changes += remove_address(PASSTHROUGH[6], where)
    return changes


def _versions(where: Any) -> "tuple[Version, ...]":
    """Return the IP versions that can be captured in a namespace: 6 only if its ``lo`` has IPv6, which REDIRECT
    needs.
    """
    from tproxy.aio.netns import entered

    with entered(where):
        return (4, 6) if _read(_LO_WITHOUT_IPV6).strip() == "0" else (4,)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
