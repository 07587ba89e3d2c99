"""The Istio dialect: WDS and authorization messages of istiod, and ztunnel's local file, to ``xds.model``."""
