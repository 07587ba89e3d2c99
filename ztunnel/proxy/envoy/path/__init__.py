"""The path of a connection in Envoy's dialect."""
