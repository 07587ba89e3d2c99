"""The node message, which istiod refuses in any other shape."""

from google.protobuf.json_format import MessageToDict

from ztunnel.proxy.istio.environment import config_from
from ztunnel.proxy.istio.xds.node_id import node_message


def shown(env: dict[str, str]) -> dict[str, object]:
    return MessageToDict(node_message(config_from(env, cpus=1, read_file=lambda path: None)))


def test_node_metadata_of_the_charts_environment() -> None:
    env = {
        "POD_NAME": "ztunnel-x",
        "POD_NAMESPACE": "istio-system",
        "INSTANCE_IP": "10.0.0.5",
        "NODE_NAME": "w1",
        "ISTIO_META_CLUSTER_ID": "Kubernetes",
        "ISTIO_META_NETWORK": "net",
        "ISTIO_METAJSON_LABELS": '{"app": "ztunnel", "n": [1, null, true]}',
    }
    assert shown(env) == {
        "id": "ztunnel~10.0.0.5~ztunnel-x.istio-system~istio-system.svc.cluster.local",
        "metadata": {
            "NAME": "ztunnel-x",
            "NAMESPACE": "istio-system",
            "INSTANCE_IPS": "10.0.0.5",
            "NODE_NAME": "w1",
            "CLUSTER_ID": "Kubernetes",
            "NETWORK": "net",
            "LABELS": {"app": "ztunnel", "n": [1.0, None, True]},
        },
    }


def test_missing_metadata_is_empty() -> None:
    assert shown({}) == {
        "id": "ztunnel~1.1.1.1~.~.svc.cluster.local",
        "metadata": {"NAME": "", "NAMESPACE": "", "INSTANCE_IPS": "1.1.1.1", "NODE_NAME": ""},
    }


def test_metadata_variables_override_defaults() -> None:
    assert shown({"NODE_NAME": "a", "ISTIO_META_NODE_NAME": "b"})["metadata"]["NODE_NAME"] == "b"  # type: ignore[index]
