"""The bookinfo mesh of the specification."""

import copy
from typing import Any

import yaml

from ztunnel.control_plane.mesh import Mesh, parse_mesh

BOOKINFO: dict[str, Any] = {
    "nodes": {"worker": {}, "worker2": {}},
    "pods": {
        "productpage": {"node": "worker2", "addresses": ["10.244.2.3"], "service_account": "bookinfo-productpage"},
        "reviews-v1": {"node": "worker", "addresses": ["10.244.1.23"], "service_account": "bookinfo-reviews"},
        "reviews-v2": {"node": "worker2", "addresses": ["10.244.2.23"], "service_account": "bookinfo-reviews"},
        "reviews-v3": {"node": "worker2", "addresses": ["10.244.2.22"], "service_account": "bookinfo-reviews"},
        "legacy": {"node": "worker", "addresses": ["10.244.1.30"], "mesh": False},
    },
    "services": {
        "reviews": {
            "addresses": ["10.96.183.192"],
            "ports": {"http": 9080},
            "pods": ["reviews-v1", "reviews-v2", "reviews-v3"],
        }
    },
    "policies": {
        "reviews-viewer": {
            "service_account": "bookinfo-reviews",
            "rules": [{"from": {"principals": ["cluster.local/ns/default/sa/bookinfo-productpage"]}}],
        }
    },
}


def document(**changes: Any) -> dict[str, Any]:
    """The mesh file with some top-level keys replaced."""
    return {**copy.deepcopy(BOOKINFO), **changes}


def mesh(**changes: Any) -> Mesh:
    """The mesh, read."""
    return parse_mesh(yaml.safe_dump(document(**changes)))
