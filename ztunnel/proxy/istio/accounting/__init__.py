"""Accounts for connections in an Istio mesh: their access log lines, metrics and outcomes."""
