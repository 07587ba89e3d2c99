"""Hands the open connections of an Istio node proxy over to the process that replaces it."""
