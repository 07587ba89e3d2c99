"""Listeners at run time: sockets, listener filters, filter chains, and updates to a new version."""
