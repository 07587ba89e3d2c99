"""Shared by all processes of this project: clocks, tasks, accepted sockets, the heap, readers of settings."""
