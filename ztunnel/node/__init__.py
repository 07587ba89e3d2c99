"""Programs on a node beside the proxy: the agent that enrols pods, and manual interception."""
