"""Hand-over in Envoy's dialect: moves a proxy's open connections to the process that replaces it."""
