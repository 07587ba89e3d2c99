"""For proxies inside pods: the injector and the init container."""
