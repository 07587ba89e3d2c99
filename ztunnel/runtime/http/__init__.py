"""HTTP/1.1 pages as values, and the server of the admin, readiness and metrics ports."""
