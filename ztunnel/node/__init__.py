"""What runs on a node beside the proxy: the agent that enrols pods, and interception by hand."""
