"""ZDS: the protocol by which the node agent announces the pods of this node, with their network namespaces."""
