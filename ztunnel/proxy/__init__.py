"""The node proxy: start at ``istio/path/outbound.py`` or ``envoy/path/datapath.py``."""
