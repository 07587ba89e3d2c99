"""Deployments of the proxy: the demo, the lab that it runs in, and the manifests for a cluster."""
