"""Evaluates Calico's policies, as sent by PolicySync, for a flow. Pure; servers and clients are elsewhere."""
