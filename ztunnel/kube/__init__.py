"""Objects of a Kubernetes API server: as values, from an API server, from files."""
