"""The mesh as the proxy understands it: immutable values, whatever dialect they came in.

Nothing here knows protobuf, sockets or time. A dialect (``xds.dialects``) compiles messages into these
values or refuses them with :class:`xds.errors.ConfigError`; the application only ever reads them.
"""
