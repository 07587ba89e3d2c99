"""The admin, readiness and metrics pages of an Istio mesh, in the shapes that istioctl reads."""
