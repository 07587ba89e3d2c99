"""Statistics in Envoy's dialect: counters, the admin pages that show them, and their export."""
