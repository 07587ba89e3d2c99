"""The kernel's state as wanted and found resources: nftables, policy routing, veth pairs, sysctls.

No module "adds a rule". ``node.py`` and ``inpod.py`` state the wanted resources, ``aio/kernel.py`` reads the found
ones, ``diff.py`` returns the difference, and ``aio/kernel.py`` applies it. Modules outside ``aio/`` do no input or
output.
"""
