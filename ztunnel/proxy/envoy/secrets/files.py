"""Follows the files named by secrets and TLS contexts, so that a renewed certificate is served at once.

Every file is checked each second, following all symbolic links. This detects renamed files, files written in
place, and changes of the ``..data`` link in Kubernetes' volumes, on every file system. If a file is unusable, the
last valid version stays in use. The error is reported only if the file is still unchanged at the next check,
because a certificate and its key are renewed one after the other.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from xds.errors import ConfigError
from xds.model.secret import Certificate, Secret
from ztunnel.runtime.watched_file import FileState, file_state

log = logging.getLogger(__name__)

_EVERY_S = 1.0

T = TypeVar("T", bound=Secret)


def files_of(secrets: Iterable[Secret | None]) -> tuple[str, ...]:
    """Return the paths of the files that the given secrets were read from."""
    paths: list[str] = []
    for secret in secrets:
        if isinstance(secret, Certificate):
            paths += (secret.chain_file, secret.key_file, secret.password_file)
        elif secret is not None:
            paths += (secret.trusted_ca_file, secret.crl_file)
    return tuple(dict.fromkeys(filter(None, paths)))


def reread(secret: T, read_file: Callable[[str], bytes]) -> T:
    """Read the files of a secret again, and return the resulting secret. Inline parts are unchanged.

    Raises:
        ConfigError: a file cannot be read. The error has the file's path.
    """

    def read(path: str, earlier: bytes | None) -> bytes | None:
        if not path:
            return earlier
        try:
            return read_file(path)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None

    if isinstance(secret, Certificate):
        chain, key = read(secret.chain_file, secret.chain_pem), read(secret.key_file, secret.key_pem)
        assert chain is not None
        assert key is not None
        return replace(secret, chain_pem=chain, key_pem=key, password=read(secret.password_file, secret.password))
    return replace(
        secret,
        trusted_ca_pem=read(secret.trusted_ca_file, secret.trusted_ca_pem),
        crl_pem=read(secret.crl_file, secret.crl_pem),
    )


class _Followed:
    """The followed files of one secret or TLS context.

    Attributes:
        seen: the files' states at the last check, or ``None`` before the first check.
        failed: why the files are unusable in state ``seen``. Cleared once this was reported.
    """

    __slots__ = ("failed", "files", "owner", "reload", "seen")

    def __init__(self, owner: str, files: tuple[str, ...], reload: Callable[[], bool]) -> None:
        self.owner = owner
        self.files = files
        self.reload = reload
        self.seen: list[FileState] | None = None
        self.failed: ConfigError | None = None


class SecretFiles:
    """Follows the files of all secrets and TLS contexts. :meth:`run` checks the files until cancelled."""

    def __init__(self) -> None:
        self._followed: dict[_Followed, None] = {}

    def follow(self, owner: str, files: tuple[str, ...], reload: Callable[[], bool]) -> Callable[[], None]:
        """Call ``reload`` whenever a file has changed, and once soon, in case a file changed directly after its
        last read.

        Args:
            owner: the secret, listener or cluster, for the log.
            files: the paths, possibly none.
            reload: reads the files and uses their contents. Returns whether a file has changed. Raises
                ``ConfigError`` if a file is unusable. The current contents then stay in use.

        Returns:
            A function that stops following the files.
        """
        followed = _Followed(owner, files, reload)
        if files:
            self._followed[followed] = None

        def stop() -> None:
            self._followed.pop(followed, None)

        return stop

    async def run(self) -> None:
        """Check the files each second until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            self.look()

    def look(self) -> None:
        """Reload files that have changed since the last check."""
        for followed in list(self._followed):
            states = [file_state(Path(path)) for path in followed.files]
            if states != followed.seen:
                followed.seen = states
                self._reload(followed)
            elif followed.failed is not None:
                failed, followed.failed = followed.failed, None
                log.warning(
                    "%s: changed files refused, the last good version stays in use: %s", followed.owner, failed
                )

    @staticmethod
    def _reload(followed: _Followed) -> None:
        followed.failed = None
        try:
            if followed.reload():
                log.info("%s: changed files are in use", followed.owner)
        except ConfigError as error:
            followed.failed = error
        except Exception as error:  # a bug in this program must not prevent checks of other files
            log.exception("%s: cannot read the changed files", followed.owner)
            followed.failed = ConfigError(f"internal error: {type(error).__name__}")
