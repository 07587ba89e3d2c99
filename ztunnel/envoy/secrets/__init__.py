"""Secrets of Envoy's dialect: fetched by SDS, built into TLS contexts, used to verify peers."""
