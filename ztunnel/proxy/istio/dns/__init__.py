"""The DNS proxy in each pod: answers queries for names of the mesh, and forwards all other queries to name
servers.
"""
