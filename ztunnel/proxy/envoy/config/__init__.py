"""Bootstrap, settings and sources of configuration in Envoy's dialect."""
