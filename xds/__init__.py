"""Receives configuration from control planes and models the mesh. It does not touch sockets that carry traffic."""

import pkgutil

# The distribution xds-protos also has a top-level package xds, with xds.core, xds.type and others. If sys.path
# finds it after ours, its modules must stay importable, because Envoy's API for Python (generated code) needs
# them.
__path__ = pkgutil.extend_path(__path__, __name__)
