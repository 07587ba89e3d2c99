"""Statistics, access logs and Prometheus pages under Envoy's names."""
