"""Evaluates Calico's policies, which PolicySync sends, for a flow. Pure; servers and clients are elsewhere."""
