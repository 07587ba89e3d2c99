"""Secrets of Envoy's dialect: SDS subscriptions, TLS contexts built from secrets, and peer verification."""
