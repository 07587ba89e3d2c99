"""HTTP/1.1 pages: the server of the admin, readiness and metrics ports, and its answers as values."""
