"""Hands the open connections of a proxy in Envoy's dialect over to the process that replaces it."""
