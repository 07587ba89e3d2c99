"""xDS over the network and from files.

``client``  configuration from a control plane over gRPC; ``feed`` hands it to receivers
``server``  the embedded control plane
``file``    configuration from watched files

gRPC is imported when the first channel or server opens, so a node that is configured by files never loads it.
"""
