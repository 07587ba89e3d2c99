"""Which pods have rules of ours, written down: an agent that starts again finds those that left meanwhile.

The file lies beside the agent's socket below /run, and is forgotten at a reboot together with the rules.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ztunnel.istio.zds.pods import PodUid


@dataclass(frozen=True, slots=True)
class Enrolled:
    """Where rules are: how the namespace was named, and which one it was, for names are used again."""

    netns: str | int
    inode: int


def read_record(path: Path) -> dict[PodUid, Enrolled]:
    """What the last agent wrote; nothing if there was none.

    Raises:
        ValueError: the file is not what an agent writes.
        OSError: it cannot be read.
    """
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    try:
        found = {
            PodUid(uid): Enrolled(entry["netns"], int(entry["inode"])) for uid, entry in document["pods"].items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a record of pods: {error!r}") from None
    return found


def write_record(path: Path, pods: Mapping[PodUid, Enrolled]) -> None:
    """Replace the file, all of it or nothing.

    Raises:
        OSError: it cannot be written.
    """
    document = {"pods": {uid: {"netns": pod.netns, "inode": pod.inode} for uid, pod in sorted(pods.items())}}
    making = path.with_name(f".{path.name}.{os.getpid()}")
    making.write_text(json.dumps(document, indent=1) + "\n")
    making.rename(path)
