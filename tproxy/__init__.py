"""The kernel as resources wanted and resources found: nftables, policy routing, veth pairs, sysctls.

Nothing here "adds a rule". ``node.py`` and ``inpod.py`` state the wanted resources, ``aio/kernel.py`` reads the
found ones, ``diff.py`` returns the difference, and ``aio/kernel.py`` applies it. Modules outside ``aio/`` do no
input or output.
"""
