"""Creates the xDS node message, which describes this proxy to istiod."""

from xds.proto.envoy.config.core.v3.core_pb2 import Node
from ztunnel.proxy.istio.settings.config import IstioConfig


def node_message(config: IstioConfig) -> Node:
    """Return the xDS ``node`` message for the first request of each stream. Its ``id`` has the format that istiod
    requires.
    """
    namespace = config.pod_namespace
    node = Node(id=f"ztunnel~{config.instance_ip}~{config.pod_name}.{namespace}~{namespace}.svc.cluster.local")
    node.metadata.update(
        {
            "NAME": config.pod_name,
            "NAMESPACE": namespace,
            "INSTANCE_IPS": config.instance_ip,
            "NODE_NAME": config.node,
            **config.proxy_metadata,
            **config.metadata_json,
        }
    )
    return node
