"""The mesh as immutable values, independent of the xDS dialect that described it.

This package does not depend on protobuf, sockets or time. A dialect (``xds.dialects``) compiles messages into
these values or refuses them with :class:`xds.errors.ConfigError`; the application only ever reads them.
"""
