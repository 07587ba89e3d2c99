"""The CNI plugin: a file for the host, and what puts it there."""
