"""The front end for Envoy's dialect: listeners, filter chains and clusters. Start reading at datapath.py."""
