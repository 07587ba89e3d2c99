"""What proxies inside pods need: the injector and the init container."""
