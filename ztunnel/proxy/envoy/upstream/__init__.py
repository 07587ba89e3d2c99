"""Clusters at run time: their hosts, load balancing, health checks and circuit breakers."""
