"""ZDS: the protocol that the node agent uses to announce the pods of this node, with their network namespaces."""
