"""Carries connections in an Istio mesh, outbound and inbound, and makes all decisions about them."""
