"""HTTP/1.1 pages: the server behind the admin, readiness and metrics ports, and the form of its answers."""
