"""What is known of one stream in Envoy's dialect, and how it ended."""
