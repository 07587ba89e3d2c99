"""Receives configuration from control planes and models the mesh. It does not touch sockets that carry traffic."""

import pkgutil

# The distribution xds-protos has a top-level package xds, too, with xds.core, xds.type and others beside our
# folders. Where sys.path finds it after ours, its modules stay importable: Envoy's API as generated for Python
# needs them.
__path__ = pkgutil.extend_path(__path__, __name__)
