"""The kernel as resources wanted and resources found: nftables, policy routing, veth pairs, sysctls.

Nothing here "adds a rule". ``node.py`` states what should be, ``aio/kernel.py`` reads what is, ``diff.py``
finds the difference and the kernel gets that. Modules outside ``aio/`` do no input or output.
"""
