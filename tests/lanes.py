"""The order in which workers take tests: one worker prefers tests that compute, the others tests that wait.

``make test`` starts more workers than two cores can keep busy. Tests that start processes wait most of their time,
tests of one process compute. With both kinds running until the end, cores are not idle, and few processes compete
for them. A worker without tests of its kind takes the other kind. ``tests/forking.py`` has the workers.

A file runs in order on one worker, and so does a ``group`` of tests that share a site. In files of
:data:`APART` every test is a separate unit. The longest units begin first, because the last one to begin decides
when the run ends.
"""

#: Files and folders whose tests start processes and wait for them, in the order in which they begin.
WAITING = (
    "tests/test_compiled.py",
    "tests/interop/test_interop.py",
    "tests/hostile/",
    "tests/deploy/test_side_by_side.py",
    "tests/netns/test_demo.py",
    "tests/interop/",
    "tests/netns/",
    "tests/handover/",
    "tests/apiserver/",
    "tests/soak/",
    "tests/deploy/",
)
#: Files of one process whose tests take seconds, in the order in which they begin.
COMPUTING = (
    "tests/hbone/test_work.py",
    "tests/hbone/test_frame_pairs.py",
    "tests/xds/aio/test_channel.py",
    "tests/fuzz/",
    "tests/hbone/test_windows.py",
    "tests/hbone/aio/test_relay.py",
    "tests/xds/dialects/test_fields.py",
    "tests/ztunnel/policy/calico/test_parts.py",
)
#: Files whose tests share nothing and take seconds each.
APART = ("tests/netns/test_demo.py",)


def unit_of(node_id: str) -> str:
    """Return the name of the unit that a test belongs to: its group, itself, or its file.

    Args:
        node_id: with ``@`` and the name of its ``group``, if it has one.
    """
    if node_id.rfind("@") > node_id.rfind("]"):
        return node_id.rpartition("@")[2]
    file = node_id.partition("::")[0]
    return node_id if file in APART else file


def prefers_waiting(worker: int) -> bool:
    """Return whether a worker, numbered from 0, takes tests that wait before those that compute."""
    return worker != 1


def order(node_id: str, *, waits: bool) -> tuple[bool, int]:
    """Return a key that sorts units: a worker's own kind first, then as :data:`WAITING` and :data:`COMPUTING` have
    them.

    Args:
        node_id: any test of the unit.
        waits: whether the worker prefers tests that wait.
    """
    waiting = next((place for place, start in enumerate(WAITING) if node_id.startswith(start)), None)
    if waiting is not None:
        return not waits, waiting
    long = (place for place, start in enumerate(COMPUTING) if node_id.startswith(start))
    return waits, next(long, len(COMPUTING))
