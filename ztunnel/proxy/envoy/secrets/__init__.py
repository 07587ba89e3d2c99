"""Secrets of Envoy's dialect: fetches them by SDS, makes TLS contexts from them, and verifies peers."""
