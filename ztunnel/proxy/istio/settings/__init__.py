"""The settings of a proxy in an Istio mesh."""
