"""What runs the proxy somewhere: the demo, and the manifests of a cluster."""
