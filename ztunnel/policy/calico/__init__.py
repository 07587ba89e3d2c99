"""Calico's policy as sent by PolicySync, evaluated for a flow. Pure; servers and clients are elsewhere."""
