"""Keeps the CA bundle in a webhook configuration equal to a file, after changes of either.

Tools that reapply manifests insert an empty bundle, and the certificate's issuer changes the file. Several
replicas keep the same object: a patch without a change is not sent. If another writer repeatedly writes a
different bundle, the waits between two writes double up to a minute, because two competing writers have filled
etcds.
"""

import asyncio
import logging
from pathlib import Path
from typing import Final

from ztunnel.kube.client import Client
from ztunnel.kube.errors import ApiRefused, KubeError
from ztunnel.kube.informer import Informer
from ztunnel.kube.kinds import MUTATING_WEBHOOK, Selection
from ztunnel.kube.objects import Object
from ztunnel.runtime.backoff import Backoff
from ztunnel.runtime.settings import plain_reason
from ztunnel.sidecar.inject.bundle import BadBundle, operations

log = logging.getLogger(__name__)

_POLL_S: Final = 1.0
_FIRST_WAIT_S: Final = 1.0
_LONGEST_WAIT_S: Final = 60.0


async def keep_bundle(client: Client, name: str, ca_file: Path) -> None:
    """Keep the CA bundle of the webhook configuration ``name`` current, until cancelled.

    Args:
        client: its role needs ``list``, ``watch`` and ``patch`` of this configuration.
        name: the name of a MutatingWebhookConfiguration. All its entries are ours.
        ca_file: the CA in PEM, read every second. While it is unreadable, the configuration stays unchanged.
    """
    loop = asyncio.get_running_loop()
    configuration: Object | None = None
    backoff = Backoff(_FIRST_WAIT_S, _LONGEST_WAIT_S)
    # The first write is not delayed. Each later write waits for a back-off after the previous one.
    not_before_s = loop.time()
    said = ""
    async with Informer(client, (Selection(MUTATING_WEBHOOK, fields=f"metadata.name={name}"),)) as informer:
        while True:
            try:
                async with asyncio.timeout(_POLL_S):
                    changes = await informer.next()
                for value in changes.objects.values():
                    configuration = value
            except TimeoutError:
                pass
            fault = ""
            try:
                patch = [] if configuration is None else operations(configuration, _read(ca_file))
                if patch and loop.time() >= not_before_s:
                    not_before_s = loop.time() + backoff.next()
                    configuration = await client.json_patch(MUTATING_WEBHOOK, "", name, patch)
                    log.info("inject: the CA of %s entries of %s is current again", len(patch) // 2, name)
                elif not patch and loop.time() >= not_before_s + _LONGEST_WAIT_S:
                    backoff.reset()
            except ApiRefused as error:
                # 404 means that the owner has deleted the object. 422 means that an entry has moved. An event
                # about either follows.
                if error.status not in (404, 422):
                    fault = str(error)
            except (KubeError, BadBundle, OSError) as error:
                fault = f"{ca_file} {error}" if isinstance(error, BadBundle) else plain_reason(error)
            if fault and fault != said:
                log.error("inject: the CA bundle of %s cannot be updated: %s", name, fault)
            said = fault


def _read(ca_file: Path) -> bytes:
    """Read a small file of a mounted secret without a thread, because the file is in memory."""
    return ca_file.read_bytes()
