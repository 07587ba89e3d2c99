"""``ztunnel addons`` lists the addons of a running proxy; ``ztunnel addon`` starts, checks and tests one."""

from typing import Any

from ztunnel.ask.addons import listing, workshop


def add_arguments(subparsers: Any) -> None:
    """Add both commands to ``argparse``'s sub-commands; ``args.run`` runs one."""
    listing.add_arguments(subparsers)
    workshop.add_arguments(subparsers)
