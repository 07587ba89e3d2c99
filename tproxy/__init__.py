"""The kernel's state as desired and found resources: nftables, policy routing, veth pairs, sysctls.

No module "adds a rule". ``node.py`` and ``inpod.py`` return the desired resources, ``aio/kernel.py`` reads the
found ones, ``diff.py`` returns the difference, and ``aio/kernel.py`` applies it. Modules outside ``aio/`` do no
input or output.
"""
