"""The facts about one stream in Envoy's dialect, and how it ended."""
