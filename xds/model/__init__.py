"""The mesh as immutable values, independent of the xDS dialect that described it.

This package does not depend on protobuf, sockets or time. A dialect (``xds.dialects``) compiles messages to these
values, or refuses the messages with :class:`xds.errors.ConfigError`. The application only reads the values.
"""
