"""Folders of network configurations beside libcni: which file a runtime takes, and that ours is in it."""

import json
import shutil
import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.generated import examples
from tests.golang.oracle import Oracle
from ztunnel.node.agent.cni.conflist import TYPE
from ztunnel.node.agent.cni.installer import Installation, NoNetwork, install, taken_by_runtime, uninstall

_NAMES = (
    "00-multus.conf 00-multus.conflist 00-multus.json 02-x.conf 10-net.conf 10-net.conflist 10-net.json 10-net.txt"
    " .conf .hidden.conf 10-NET.conf 99-z.conflist 02-ztunnel.conf"
)
NAMES = st.sampled_from(_NAMES.split())
PLAIN = '{"cniVersion": "0.3.1", "name": "a", "type": "bridge"}'
LISTED = '{"cniVersion": "1.0.0", "name": "b", "plugins": [{"type": "calico"}, {"type": "portmap"}]}'
BAD = r"""

{
[]
7
{}
{"type": ""}
{"type": 7}
{"type": "x", "name": 7}
{"type": "x", "ipam": []}
{"plugins": [{"type": "x"}]}
{"name": "", "plugins": [{"type": "x"}]}
{"name": "n", "plugins": []}
{"name": "n", "plugins": [{"type": "x"}, {}]}
{"name": "n", "plugins": {"type": "x"}}
{"name": "n", "cniVersion": 1, "plugins": [{"type": "x"}]}
{"type": "x", "dns": null, "y": NaN}
{"type": "x", "capabilities": {"portMappings": true}}
{"type": "x", "ipam": {"type": "host-local"}}"""
TEXTS = st.sampled_from(
    [PLAIN, PLAIN.replace("bridge", "flannel"), LISTED, LISTED.replace("calico", "cilium-cni"), *BAD.split("\n")]
)
FOLDERS = st.dictionaries(NAMES, TEXTS, max_size=5)


def taken(go: Oracle, folder: Path) -> tuple[str, list[str]] | None:
    found = go.ask("cni", str(folder))
    return (Path(found["file"]).name, found["plugins"]) if found else None


@settings(max_examples=examples(600), deadline=None)
@given(st.lists(FOLDERS, min_size=1, max_size=3), st.booleans())
@example([{"00-multus.conf": PLAIN}, {"00-multus.conf": PLAIN}], False)
@example([{"10-net.json": PLAIN, "99-z.conflist": LISTED}], False)
@example([{"02-x.conf": PLAIN}], True)
@example([{".hidden.conf": PLAIN, "10-net.conflist": LISTED}], True)
def test_ours_is_last_in_the_file_that_libcni_takes_after_each_look(
    go: Oracle, writes: list[dict[str, str]], owned: bool
) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        for name in ("bin", "net.d"):
            (folder / name).mkdir()
        network = folder / "net.d"
        wanted = Installation(binaries=folder / "bin", configurations=network, owned=owned)
        for files in writes:
            for name, text in files.items():
                (network / name).write_text(text)
            before = taken(go, network)
            path = taken_by_runtime(network)
            assert (path and path.name) == (before and before[0])
            try:
                install(wanted)
            except NoNetwork:
                # Without a configuration of the network's, a copy of ours goes on serving.
                assert before is None or before[1][-1] == TYPE
                continue
            after = taken(go, network)
            assert before is not None
            assert after is not None
            assert after[1][-1] == TYPE
            assert after[1].count(TYPE) == 1
            if TYPE not in before[1]:
                assert after[1][:-1] == before[1]  # the network is the one that the runtime took
            assert install(wanted) == []
        uninstall(wanted)
        left = taken(go, network)
        assert left is None or TYPE not in left[1]
        assert all(json.loads(each.read_text()) for each in network.glob(f"*{TYPE}*"))
    finally:
        shutil.rmtree(folder)
