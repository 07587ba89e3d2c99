"""Clusters at run time: hosts, balancing, health, limits."""
