"""The admin, readiness and metrics pages of a proxy in an Istio mesh, in the formats that istioctl reads."""
