"""Hands open connections over to the process that replaces this one: the code shared by both dialects.

Each front end supplies the units that move together (:class:`~ztunnel.proxy.dataplane.handover.giver.Unit`), a
message type for their state, and a receiver (:class:`~ztunnel.proxy.dataplane.handover.taker.Pending`).
"""
