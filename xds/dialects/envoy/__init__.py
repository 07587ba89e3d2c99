"""Envoy's dialect: compiles LDS, CDS, EDS, RDS, SDS and ECDS messages to model values.

Every compiler either returns a value that the proxy obeys in full, or raises ``ConfigError`` with the path of the
offending field. Fields that this proxy does not implement are refused by name (:func:`reading.only`), except
fields without an effect here. A new field in a message is therefore an error until a developer has handled it.

Three generations of the ambient configuration (2022) are supported. They differ only in names, except for
``set_dst_address`` and SAN lists (see ``listener_filters`` and ``tls``).
"""

from xds.dialects.envoy.cluster import compile_cluster
from xds.dialects.envoy.endpoint import compile_assignment
from xds.dialects.envoy.filters import compile_chain_filter
from xds.dialects.envoy.listener import compile_listener
from xds.dialects.envoy.listener_filters import compile_listener_filter
from xds.dialects.envoy.reading import Surroundings
from xds.dialects.envoy.route import compile_route_table
from xds.dialects.envoy.tls import compile_secret

__all__ = [
    "Surroundings",
    "compile_assignment",
    "compile_chain_filter",
    "compile_cluster",
    "compile_listener",
    "compile_listener_filter",
    "compile_route_table",
    "compile_secret",
]
