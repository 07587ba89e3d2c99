"""Statistics in Envoy's dialect: counters, their pages, their export."""
