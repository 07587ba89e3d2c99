"""Istio's dialect: compiles istiod's WDS and authorization messages, and ztunnel's local file."""
