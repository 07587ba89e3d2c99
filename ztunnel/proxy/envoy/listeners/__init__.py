"""Listeners at run time: sockets, listener filters, filter chains, and how one version replaces another."""
