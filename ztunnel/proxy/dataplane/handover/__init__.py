"""Hands open connections over to the process that replaces this one.

This code is shared by both dialects (Istio and Envoy). Each front end supplies the units of connections that move
together (:class:`~ztunnel.proxy.dataplane.handover.giver.Unit`), a message type for their state, and a receiver
(:class:`~ztunnel.proxy.dataplane.handover.taker.Pending`).
"""
