"""The path of a connection in an Istio mesh: outbound, inbound, and their decisions."""
