"""Compiles a cluster's load balancing: ``lb_policy`` with its fields, or a policy extension."""

from typing import Final

from google.protobuf.message import Message

from xds.dialects.envoy.reading import at, constraint, enum_name, only, seconds, unpack, wrapped
from xds.errors import ConfigError, Unsupported
from xds.model.cluster import Balancing, Discovery, LbPolicy, SlowStart
from xds.proto import registry
from xds.proto.envoy.config.cluster.v3 import cluster_pb2 as proto
from xds.proto.envoy.extensions.load_balancing_policies.cluster_provided.v3.cluster_provided_pb2 import (
    ClusterProvided,
)
from xds.proto.envoy.extensions.load_balancing_policies.common.v3 import common_pb2 as common
from xds.proto.envoy.extensions.load_balancing_policies.least_request.v3.least_request_pb2 import LeastRequest
from xds.proto.envoy.extensions.load_balancing_policies.maglev.v3.maglev_pb2 import Maglev
from xds.proto.envoy.extensions.load_balancing_policies.random.v3.random_pb2 import Random
from xds.proto.envoy.extensions.load_balancing_policies.ring_hash.v3.ring_hash_pb2 import RingHash
from xds.proto.envoy.extensions.load_balancing_policies.round_robin.v3.round_robin_pb2 import RoundRobin

#: Envoy's limits for the sizes of ring_hash rings and maglev tables.
_LARGEST_RING: Final = 8_388_608
_LARGEST_TABLE: Final = 5_000_011


def compile_balancing(message: proto.Cluster, discovery: Discovery) -> Balancing:
    """Compile the load balancing of a cluster.

    Raises:
        ConfigError: a setting is not supported or not valid. The error contains its field path.
    """
    panic = 50.0
    if message.common_lb_config.HasField("healthy_panic_threshold"):
        with at("common_lb_config", "healthy_panic_threshold"):
            panic = message.common_lb_config.healthy_panic_threshold.value
            if not 0 <= panic <= 100:
                threshold = message.common_lb_config.healthy_panic_threshold
                raise constraint(threshold, "value", "value must be inside range [0, 100]")
    if message.HasField("load_balancing_policy"):
        with at("load_balancing_policy"):
            found = _extension(message, panic)
    else:
        found = _own(message, panic)
    provided = found.policy is LbPolicy.CLUSTER_PROVIDED
    if discovery is Discovery.ORIGINAL_DST and not provided:
        raise ConfigError(
            f"cluster: LB policy {found.policy} is not valid for Cluster type ORIGINAL_DST. Only "
            "'CLUSTER_PROVIDED' is allowed with cluster type 'ORIGINAL_DST'"
        )
    if provided and discovery is not Discovery.ORIGINAL_DST:
        raise ConfigError(
            f"cluster: LB policy CLUSTER_PROVIDED cannot be combined with cluster type {discovery}", "lb_policy"
        )
    return found


def _own(message: proto.Cluster, panic: float) -> Balancing:
    name = enum_name(message, "lb_policy")
    if name == "LOAD_BALANCING_POLICY_CONFIG":
        raise ConfigError("cluster: field load_balancing_policy need to be set", "lb_policy")
    least = message.least_request_lb_config
    slow = message.round_robin_lb_config.slow_start_config
    if message.HasField("least_request_lb_config"):
        slow = least.slow_start_config
    return Balancing(
        policy=LbPolicy(name),
        choice_count=_choices(least),
        active_request_bias=_bias(least),
        slow_start=_slow_start(slow),
        panic_threshold=panic,
        locality_weighted=message.common_lb_config.HasField("locality_weighted_lb_config"),
        fail_in_panic=message.common_lb_config.zone_aware_lb_config.fail_traffic_on_panic,
    )


# Extensions


def _extension(message: proto.Cluster, panic: float) -> Balancing:
    """Return the first load balancing policy in the list whose type is known. Control planes list alternatives.

    A policy of a known type with unsupported settings is refused, not skipped.
    """
    policies = message.load_balancing_policy.policies
    if message.common_lb_config.HasField("locality_weighted_lb_config"):
        raise ConfigError("localities are weighted by the policy's own locality_lb_config")
    for index, policy in enumerate(policies):
        entry = policy.typed_extension_config
        with at("policies", index, "typed_extension_config", "typed_config"):
            try:
                registry.message_for(entry.typed_config.type_url)
            except registry.UnknownType:
                continue
            return _policy(unpack(entry.typed_config, entry.name), panic)
    names = ", ".join(policy.typed_extension_config.name for policy in policies)
    raise Unsupported(f"cluster: didn't find a registered load balancer factory with names from {names}")


def _policy(found: Message, panic: float) -> Balancing:
    match found:
        case RoundRobin():
            return Balancing(
                policy=LbPolicy.ROUND_ROBIN,
                slow_start=_slow_start(found.slow_start_config),
                panic_threshold=panic,
                locality_weighted=_weighted(found.locality_lb_config),
            )
        case LeastRequest():
            return Balancing(
                policy=LbPolicy.LEAST_REQUEST,
                # a choice count of 1 means a random host, which Envoy accepts, too
                choice_count=max(1, wrapped(found, "choice_count", 2)),
                active_request_bias=_bias(found),
                slow_start=_slow_start(found.slow_start_config),
                panic_threshold=panic,
                locality_weighted=_weighted(found.locality_lb_config),
            )
        case Random():
            weighted = _weighted(found.locality_lb_config)
            return Balancing(policy=LbPolicy.RANDOM, panic_threshold=panic, locality_weighted=weighted)
        case RingHash():
            return _ring(found, panic)
        case Maglev():
            return _maglev(found, panic)
        case ClusterProvided():
            return Balancing(policy=LbPolicy.CLUSTER_PROVIDED, panic_threshold=panic)
        case _:
            raise Unsupported(f"no such load balancing policy: {found.DESCRIPTOR.full_name}")


def _ring(found: RingHash, panic: float) -> Balancing:
    if found.hash_function not in (RingHash.DEFAULT_HASH, RingHash.XX_HASH):
        raise Unsupported("rings are made with xxHash", "hash_function")
    smallest = wrapped(found, "minimum_ring_size", 1024)
    largest = wrapped(found, "maximum_ring_size", _LARGEST_RING)
    for field, size in (("minimum_ring_size", smallest), ("maximum_ring_size", largest)):
        if size > _LARGEST_RING:
            raise constraint(found, field, f"value must be less than or equal to {_LARGEST_RING}")
    if smallest > largest:
        raise ConfigError(
            f"ring hash: minimum_ring_size ({smallest}) > maximum_ring_size ({largest})", "minimum_ring_size"
        )
    return Balancing(
        policy=LbPolicy.RING_HASH, ring_size_min=smallest, ring_size_max=largest, panic_threshold=panic
    )


def _maglev(found: Maglev, panic: float) -> Balancing:
    size = wrapped(found, "table_size", 65_537)
    if size > _LARGEST_TABLE:
        raise constraint(found, "table_size", f"value must be less than or equal to {_LARGEST_TABLE}")
    if not _is_prime(size):
        raise ConfigError("The table size of maglev must be prime number", "table_size")
    return Balancing(policy=LbPolicy.MAGLEV, maglev_table_size=size, panic_threshold=panic)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


# Settings of load balancing. Runtime keys cannot be set (see the bootstrap), so their default values apply.


def _choices(least: proto.Cluster.LeastRequestLbConfig) -> int:
    choices: int = wrapped(least, "choice_count", 2)
    if choices < 2:
        raise constraint(least, "choice_count", "value must be greater than or equal to 2")
    return choices


def _bias(least: proto.Cluster.LeastRequestLbConfig | LeastRequest) -> float:
    return least.active_request_bias.default_value if least.HasField("active_request_bias") else 1.0


def _slow_start(slow: proto.Cluster.SlowStartConfig | common.SlowStartConfig) -> SlowStart:
    return SlowStart(
        window_s=seconds(slow, "slow_start_window", 0.0),
        aggression=slow.aggression.default_value if slow.HasField("aggression") else 1.0,
        min_weight_percent=slow.min_weight_percent.value if slow.HasField("min_weight_percent") else 10.0,
    )


def _weighted(locality: common.LocalityLbConfig) -> bool:
    only(locality, "locality_weighted_lb_config")
    return locality.HasField("locality_weighted_lb_config")
