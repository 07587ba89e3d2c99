"""The TLS secrets in use, by name. Each comes from its configured source, and is shared by all TLS contexts."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from xds.dialects.envoy import Surroundings, compile_secret
from xds.dialects.envoy.reading import at
from xds.errors import ConfigError
from xds.model.secret import Certificate, Secret
from xds.model.tls import SecretRef
from xds.proto import registry
from xds.proto.envoy.extensions.transport_sockets.tls.v3 import tls_pb2
from xds.proto.well_known import Any as AnyMessage
from xds.protocol.resource import Subscription, Update, UpdateRejected
from ztunnel.proxy.envoy.config.sources import Sources
from ztunnel.proxy.envoy.secrets.files import SecretFiles, files_of, reread
from ztunnel.proxy.envoy.secrets.verify import check_secret, unlocked
from ztunnel.proxy.envoy.stats.stats import Scope, Stats
from ztunnel.runtime.clock import Clock

log = logging.getLogger(__name__)

TYPE_URL = registry.type_url(tls_pb2.Secret)


class SecretUser(Protocol):
    """A user of a secret, such as a TLS context."""

    def prepare(self, handle: "SecretHandle", secret: Secret) -> Callable[[], None]:
        """Prepare for a new version of a secret, without using it yet. Return a function that puts it into use.

        Raises:
            ConfigError: this user cannot use the version, which is then refused for all users.
        """


class SecretHandle:
    """One secret, its versions over time and its users.

    Attributes:
        secret: the accepted value, or ``None`` before the first value.
        body: the message as received, for dumps (which redact it).
        contents: the secret as read from its message and files, before decryption with a password.
        settled: set when the wait for the secret ends: it arrived or was removed, or the time limit passed.
        error: the error text and the time of the last rejected version.

    Args:
        ref: the secret's name and source.
        clock: the clock for all times in this object.
        waited: called with the duration of the wait, in seconds, when it ends.
    """

    def __init__(self, ref: SecretRef, clock: Clock, waited: Callable[[float], object] = lambda _: None) -> None:
        self._clock = clock
        self._waited = waited
        self._began_s = clock.monotonic()
        self.ref = ref
        self.secret: Secret | None = None
        self.contents: Secret | None = None
        self.unfollow: Callable[[], None] = lambda: None
        self.body: AnyMessage | None = None
        self.version = ""
        self.last_updated = clock.wall()
        self.settled = asyncio.Event()
        self.error: tuple[str, float] | None = None
        self.users: list[SecretUser] = []
        self.subscription: Subscription | None = None
        self.scope: Scope | None = None

    def settle(self) -> None:
        """End the wait for the secret's first version. Idempotent."""
        if not self.settled.is_set():
            self.settled.set()
            self._waited(self._clock.monotonic() - self._began_s)

    def answers(self, ref: SecretRef) -> bool:
        """Return whether a reference names this secret. For a static secret only the name counts."""
        return ref.name == self.ref.name and self.ref.source in (None, ref.source)


class SecretStore:
    """All secrets in use. The store is subscribed to a secret as long as the secret has users.

    Attributes:
        movable: whether connections of contexts with these secrets can move to another process.
        files: follows the files of secrets and contexts. The owner runs it.

    Args:
        waited: called with the seconds from the request for a secret until it arrived, was removed or the time
            limit passed.
    """

    def __init__(
        self,
        sources: Sources,
        surroundings: Surroundings,
        stats: Stats,
        clock: Clock,
        *,
        movable: bool = False,
        waited: Callable[[float], object] = lambda _: None,
    ) -> None:
        self.movable = movable
        self._waited = waited
        self._sources = sources
        self._surroundings = surroundings
        self._stats = stats
        self._clock = clock
        self._handles: dict[tuple[str, object], SecretHandle] = {}
        self._static: dict[str, SecretHandle] = {}
        self.files = SecretFiles()

    @property
    def dynamic(self) -> list[SecretHandle]:
        """Return the secrets from SDS, by name."""
        return sorted(self._handles.values(), key=lambda handle: handle.ref.name)

    @property
    def static(self) -> list[SecretHandle]:
        """Return the secrets of the bootstrap, by name."""
        return [self._static[name] for name in sorted(self._static)]

    def add_static(self, body: AnyMessage) -> None:
        """Add a secret of ``static_resources``.

        Raises:
            ConfigError: the secret is unusable.
        """
        message = registry.unpack(body)
        assert isinstance(message, tls_pb2.Secret)
        handle = SecretHandle(SecretRef(message.name, None), self._clock)  # type: ignore[arg-type]  # no source
        self._accept(handle, message, body, "")
        self._static[message.name] = handle

    def check(self, refs: Iterable[SecretRef]) -> None:
        """Raise the errors that :meth:`acquire` would raise for these references.

        Raises:
            ConfigError: there is no such source.
        """
        for ref in refs:
            if ref.name not in self._static:
                self._sources.check(ref.source)

    def find(self, ref: SecretRef) -> Secret | None:
        """Return the accepted value of a secret, or ``None`` if it has no value or no user yet."""
        handle = self._static.get(ref.name) or self._handles.get((ref.name, ref.source))
        return handle.secret if handle is not None else None

    def acquire(self, ref: SecretRef, user: SecretUser) -> SecretHandle:
        """Start using a secret. Each later version is accepted only after ``user`` has prepared for that version.

        Raises:
            ConfigError: there is no such source. Call :meth:`check` first to avoid this.
        """
        handle = self._static.get(ref.name)
        if handle is None:
            key = (ref.name, ref.source)
            handle = self._handles.get(key)
            if handle is None:
                handle = SecretHandle(ref, self._clock, self._waited)
                handle.subscription = self._sources.of(ref.source).subscribe(
                    TYPE_URL,
                    [ref.name],
                    partial(self._receive, handle),
                    initial_fetch_timeout_s=ref.initial_fetch_timeout_s,
                    on_initial_timeout=handle.settle,
                )
                handle.scope = self._stats.scope(f"sds.{ref.name}")
                self._sources.count(handle.scope, handle.subscription)
                # The handle is stored last. If the subscription fails, the next user subscribes again.
                self._handles[key] = handle
        handle.users.append(user)
        return handle

    def release(self, handle: SecretHandle, user: SecretUser) -> None:
        """Stop using a secret; ``user`` is the argument of :meth:`acquire`."""
        handle.users.remove(user)
        key = (handle.ref.name, handle.ref.source)
        if not handle.users and self._handles.get(key) is handle:
            del self._handles[key]
            handle.unfollow()
            if handle.scope is not None:
                handle.scope.close()
            if handle.subscription is not None:
                handle.subscription.close()

    async def _receive(self, handle: SecretHandle, update: Update) -> None:
        found = [resource for resource in update.resources if resource.name == handle.ref.name]
        if len(found) > 1:
            raise UpdateRejected(f"{handle.ref.name}: duplicate secret in one update")
        if not found:
            if handle.ref.name in update.removed:
                # The control plane has removed the secret. Like in Envoy, a delivered version stays in use. If
                # there is none, the wait for the secret ends.
                handle.settle()
            return
        resource = found[0]
        if handle.body is not None and handle.body.value == resource.body.value:
            # This secret is unchanged: a state-of-the-world response repeats all secrets when a single secret
            # changes.
            handle.version = resource.version
            handle.error = None
            return
        try:
            message = registry.unpack(resource.body)
            if not isinstance(message, tls_pb2.Secret):
                raise ConfigError(f"not a Secret: {resource.body.type_url}")
            self._accept(handle, message, resource.body, resource.version)
        except (ConfigError, registry.UnknownType, registry.MalformedMessage) as error:
            handle.error = (str(error), self._clock.wall())
            raise UpdateRejected(f"{handle.ref.name}: {error}") from error

    def _accept(self, handle: SecretHandle, message: tls_pb2.Secret, body: AnyMessage, version: str) -> None:
        self._use(handle, compile_secret(message, self._surroundings))
        handle.body = body
        handle.version = version
        handle.unfollow()
        handle.unfollow = self.files.follow(
            f"secret {handle.ref.name}", files_of([handle.contents]), partial(self._reload, handle)
        )

    def _reload(self, handle: SecretHandle) -> bool:
        """Read a secret's files again and use their contents. Return whether they have changed.

        Raises:
            ConfigError: the contents are unusable.
        """
        assert handle.contents is not None
        try:
            contents = reread(handle.contents, self.read_file)
            if contents == handle.contents:
                handle.error = None
                return False
            self._use(handle, contents)
        except ConfigError as error:
            handle.error = (str(error), self._clock.wall())
            raise
        return True

    def read_file(self, path: str) -> bytes:
        """Return the contents of a file named by the configuration."""
        return self._surroundings.read_file(path)

    def _use(self, handle: SecretHandle, contents: Secret) -> None:
        kind = "tls_certificate" if isinstance(contents, Certificate) else "validation_context"
        with at(kind):
            check_secret(contents)
        secret = contents
        if isinstance(secret, Certificate):
            secret = unlocked(secret)
        # If one user cannot use the new version, it is refused for all users, and the accepted version stays in
        # use.
        taken_into_use = [user.prepare(handle, secret) for user in handle.users]
        handle.secret = secret
        handle.contents = contents
        handle.error = None
        handle.last_updated = self._clock.wall()
        handle.settle()
        for take_into_use in taken_into_use:
            take_into_use()


async def settled(handles: Iterable[SecretHandle]) -> None:
    """Wait until each secret has arrived or its time limit has passed."""
    for handle in handles:
        await handle.settled.wait()
