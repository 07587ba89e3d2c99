"""Programs for sidecar proxies: the injector and the init container."""
