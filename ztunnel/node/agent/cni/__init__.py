"""The CNI plugin: a program for the host, and its installer."""
