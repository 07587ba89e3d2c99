"""The file that records pods with our rules. The next agent uses it to find pods deleted while no agent ran.

It is beside the agent's socket below /run. A reboot deletes it together with the rules.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ztunnel.proxy.istio.zds.pods import PodUid


@dataclass(frozen=True, slots=True)
class Enrolled:
    """The namespace of a pod with our rules: its name and its inode, because names are reused."""

    netns: str | int
    inode: int


def read_record(path: Path) -> dict[PodUid, Enrolled]:
    """Return the pods that the last agent recorded. Empty if there is no record.

    Raises:
        ValueError: the file is not a record.
        OSError: it cannot be read.
    """
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError:
        raise ValueError(f"{path}: not JSON") from None
    try:
        found = {
            PodUid(uid): Enrolled(entry["netns"], int(entry["inode"])) for uid, entry in document["pods"].items()
        }
    except (AttributeError, KeyError, TypeError):
        raise ValueError(f"{path}: not a record of pods") from None
    return found


def write_record(path: Path, pods: Mapping[PodUid, Enrolled]) -> None:
    """Replace the record file atomically.

    Raises:
        OSError: it cannot be written.
    """
    document = {"pods": {uid: {"netns": pod.netns, "inode": pod.inode} for uid, pod in sorted(pods.items())}}
    making = path.with_name(f".{path.name}.{os.getpid()}")
    making.write_text(json.dumps(document, indent=1) + "\n")
    making.rename(path)
