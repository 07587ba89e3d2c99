"""Data-path code that the Istio and the Envoy front end share."""
