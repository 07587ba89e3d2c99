"""Calico's policy: what PolicySync tells, evaluated for a flow. Pure; servers and clients stand elsewhere."""
