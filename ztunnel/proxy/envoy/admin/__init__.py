"""The admin, readiness and metrics pages of Envoy's dialect."""
