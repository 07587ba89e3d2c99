"""The protocol of xDS without its transport: values and state machines, no gRPC, no clock.

``resource``  the values of a source, and the contract of sources and receivers: START HERE ``types``     type URLs
and the gRPC methods that carry them ``client``    contract of the client halves; ``sotw`` and ``delta`` implement
it ``interest``  many subscriptions of one type over one stream ``file``      the content of a watched file
``snapshot``  the server half, both variants, for the embedded control plane
"""
