import pytest

from xds.errors import ConfigError
from xds.protocol.resource import SubscriptionStats
from xds.protocol.types import CDS, ECDS, LDS, SDS, method_path, type_of_method


def test_version_stat_is_the_hash_of_the_text_after_the_first_success() -> None:
    stats = SubscriptionStats()
    assert stats.version == 0
    stats.update_success, stats.version_text = 1, "1"
    assert stats.version == 13237225503670494420


@pytest.mark.parametrize(
    ("type_url", "delta", "path"),
    [
        (None, False, "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources"),
        (None, True, "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources"),
        (LDS, False, "/envoy.service.listener.v3.ListenerDiscoveryService/StreamListeners"),
        (CDS, True, "/envoy.service.cluster.v3.ClusterDiscoveryService/DeltaClusters"),
        (SDS, False, "/envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets"),
        (ECDS, True, "/envoy.service.extension.v3.ExtensionConfigDiscoveryService/DeltaExtensionConfigs"),
    ],
)
def test_grpc_methods_follow_from_type_url_and_variant(type_url: str | None, delta: bool, path: str) -> None:
    assert method_path(type_url, delta=delta) == path
    assert type_of_method(path) == (type_url, delta)


def test_unknown_types_and_services_have_no_method() -> None:
    with pytest.raises(ConfigError):
        method_path("type.googleapis.com/acme.X", delta=False)
    assert type_of_method("/grpc.health.v1.Health/Check") is None
