"""The xDS protocol as values and state machines, without gRPC, other I/O or a clock.

``resource``  the values of a source, and the interfaces of sources and receivers: START HERE
``types``     type URLs, and the gRPC methods that carry them
``client``    the interface of the client halves; ``sotw`` and ``delta`` implement it
``interest``  many subscriptions of one type on one stream
``file``      the content of a watched file
``snapshot``  the server half, in both variants, for the embedded control plane
"""
