"""The hand-over of open connections to the process that replaces this one: what both dialects share.

Each front end supplies its units (:class:`~ztunnel.proxy.dataplane.handover.giver.Unit`), a message type for their
state, and a receiver (:class:`~ztunnel.proxy.dataplane.handover.taker.Pending`).
"""
