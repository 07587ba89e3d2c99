"""The node proxy. Its data path starts at ``istio/path/outbound.py`` or ``envoy/path/datapath.py``."""
