"""What is recorded of a connection in an Istio mesh: log lines, metrics, outcomes."""
