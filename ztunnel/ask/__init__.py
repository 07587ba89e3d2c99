"""Commands that ask a running proxy, or judge saved state: inspect, simulate, limits."""
