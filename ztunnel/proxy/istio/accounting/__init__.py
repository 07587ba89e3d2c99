"""Accounting of a connection in an Istio mesh: log lines, metrics, outcomes."""
