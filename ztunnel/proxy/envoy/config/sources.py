"""The sources of resources that the configuration names: the aggregated stream, a file, or a separate stream."""

from collections.abc import Callable
from operator import attrgetter

from xds.errors import ConfigError
from xds.model.tls import AdsSource, ConfigSource, FileSource, GrpcSource
from xds.protocol.resource import ResourceSource, Subscription
from ztunnel.proxy.envoy.stats.stats import Counter, Declared, Gauge, Scope, TextReadout

#: Envoy's statistics of one xDS subscription. ``version`` is a hash of the version string.
_COUNTED = (
    *(
        Declared(name, Counter, attrgetter(f"stats.{name}"))
        for name in ("update_attempt", "update_success", "update_failure", "update_rejected", "init_fetch_timeout")
    ),
    Declared("update_time", Gauge, attrgetter("stats.update_time")),
    Declared("version", Gauge, attrgetter("stats.version")),
    Declared("version_text", TextReadout, attrgetter("stats.version_text")),
)


class Sources:
    """The configuration sources of the process, each created on first use.

    Args:
        ads: the aggregated stream, if the bootstrap configures it.
        open_file: opens a source that reads one watched file.
        open_stream: opens a separate stream for one type of resource to a cluster of the bootstrap. Raises
            ``ConfigError`` for any other cluster.
    """

    def __init__(
        self,
        ads: ResourceSource | None,
        open_file: Callable[[FileSource], ResourceSource],
        open_stream: Callable[[GrpcSource], ResourceSource],
    ) -> None:
        self._ads = ads
        self._open_file = open_file
        self._open_stream = open_stream
        self._made: dict[ConfigSource, ResourceSource] = {}

    def check(self, source: ConfigSource) -> None:
        """Raise the errors that :meth:`of` would raise, but do not watch a file.

        Called before a resource is used: if the resource refers to an unusable source, it is refused as a whole,
        instead of waiting forever for an answer.

        Raises:
            ConfigError: there is no such source.
        """
        if not isinstance(source, FileSource):
            self.of(source)

    def of(self, source: ConfigSource) -> ResourceSource:
        """Return the source that a configuration names.

        Raises:
            ConfigError: the bootstrap has no aggregated stream, or no such cluster.
        """
        if isinstance(source, AdsSource):
            if self._ads is None:
                raise ConfigError("the configuration requests ADS, but the bootstrap has no ads_config")
            return self._ads
        made = self._made.get(source)
        if made is None:
            made = self._open_file(source) if isinstance(source, FileSource) else self._open_stream(source)
            self._made[source] = made
        return made

    @staticmethod
    def count(scope: Scope, subscription: Subscription) -> None:
        """Make pages show a subscription's statistics under ``scope``, from ``update_attempt`` to
        ``version_text``.
        """
        scope.declare(_COUNTED, subscription)
