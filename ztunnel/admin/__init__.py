"""What people and scrapers ask the proxy: admin, readiness and metrics servers."""
