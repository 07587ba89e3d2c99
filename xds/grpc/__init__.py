"""The client side of gRPC without I/O: how a call is encoded in HTTP/2, and one connection with its calls.

``address``     ``host:port`` and ``unix:/path``
``heads``       the header fields of a request, and whether an answer is one of gRPC
``status``      how a call ends
``messages``    DATA cut into messages
``tls``         which certificate is a control plane's
``connection``  the client's connection, a state machine on ``h2``: bytes in, events out, bytes to send

The asyncio shell is :mod:`xds.aio.channel`. Messages are ``bytes``; their content is the callers' business.

Not implemented, because control planes do not need it: compression (never offered, refused by name), retries, load
balancing, binary metadata (passed on as base64).

Source: "gRPC over HTTP2" (github.com/grpc/grpc, doc/PROTOCOL-HTTP2.md), called the protocol below.
"""
