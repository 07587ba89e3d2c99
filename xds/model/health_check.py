"""Active health checks of a cluster (``envoy.config.core.v3.HealthCheck``)."""

from dataclasses import dataclass

from xds.model.address import SocketAddress


@dataclass(frozen=True, slots=True)
class TcpCheck:
    """A health check by TCP: it connects. Optionally it then sends bytes, and expects certain bytes in return, in
    order.
    """

    send: bytes = b""
    receive: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class HttpCheck:
    """A health check by an HTTP request without a body.

    Attributes:
        method: the request's method.
        headers: headers added to the request, in order.
        host: the request's host. Empty means the cluster's name.
        expected: ranges of statuses, ends excluded, that count as healthy.
        retriable: ranges of statuses that count as no answer. One such answer does not make a host unhealthy.
    """

    path: str
    host: str = ""
    method: str = "GET"
    headers: tuple[tuple[str, str], ...] = ()
    expected: tuple[tuple[int, int], ...] = ((200, 201),)
    retriable: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class GrpcCheck:
    """A health check by calling ``grpc.health.v1.Health/Check``. An empty ``service`` means the server as a
    whole.
    """

    service: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """One health check: its kind, its intervals, and its thresholds. Times are in seconds.

    Attributes:
        interval_s: the interval for a healthy host.
        unhealthy_interval_s: the interval for an unhealthy host.
        unhealthy_edge_s, healthy_edge_s: the interval for the first check after a change of health.
        no_traffic_s, no_traffic_healthy_s: the intervals while the cluster has never had a connection, for an
            unhealthy and a healthy host.
        initial_jitter_s, jitter_s: the largest random time added to the first interval, and to each interval.
        jitter_share: the largest random share of an interval added to it.
        unhealthy_threshold, healthy_threshold: the number of consecutive results that change a host's state.
    """

    check: TcpCheck | HttpCheck | GrpcCheck
    timeout_s: float
    interval_s: float
    unhealthy_threshold: int
    healthy_threshold: int
    unhealthy_interval_s: float
    unhealthy_edge_s: float
    healthy_edge_s: float
    no_traffic_s: float = 60.0
    no_traffic_healthy_s: float = 60.0
    initial_jitter_s: float = 0.0
    jitter_s: float = 0.0
    jitter_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointCheck:
    """The differences of one endpoint from the cluster's health check.

    Attributes:
        address: the address to check. ``None``: the endpoint's own.
        port: the port to check. 0: the address's own.
        host: the host of HTTP requests. Empty means the cluster's.
        disabled: the endpoint is not checked.
    """

    address: SocketAddress | None = None
    port: int = 0
    host: str = ""
    disabled: bool = False
