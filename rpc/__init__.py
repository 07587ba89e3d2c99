"""gRPC over the tunnel engine's HTTP/2: calls of bytes messages, both roles, for what control planes speak.

``status`` and ``heads`` say what a call looks like in header fields, ``messages`` cuts DATA into messages; none of
them does input or output. ``aio`` has the connection, the client's :class:`~rpc.aio.client.Channel` and the
:class:`~rpc.aio.server.Server`. Messages are ``bytes`` on both sides: what is in them is the callers' business.

Not implemented, for no control plane asks for it: compression (never offered, refused by name), retries, load
balancing, binary metadata (passed on as the base64 it comes as).

Source: "gRPC over HTTP2" (github.com/grpc/grpc, doc/PROTOCOL-HTTP2.md), called the protocol below.
"""
