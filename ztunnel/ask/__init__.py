"""Commands that query running proxies, or evaluate their saved state."""
