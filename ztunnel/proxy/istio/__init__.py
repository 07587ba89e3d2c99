"""The front end for an Istio mesh: workloads, services, policies. Start reading at outbound.py and inbound.py."""
