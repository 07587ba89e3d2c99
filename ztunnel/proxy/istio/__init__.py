"""The proxy's front end for an Istio mesh. Start reading at path/outbound.py and path/inbound.py."""
