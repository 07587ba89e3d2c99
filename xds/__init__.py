"""What control planes say, and the mesh they describe. Knows nothing of sockets that carry traffic."""
