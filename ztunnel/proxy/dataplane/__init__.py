"""Data-path code that is shared by the two front ends, Istio and Envoy."""
