"""Telling a client half what changed is the same as telling it all that is wanted."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generated import examples
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.protocol.client_state import ClientOptions
from xds.protocol.delta import DeltaClient
from xds.protocol.sotw import SotwClient
from xds.protocol.types import EDS

_NAMES = st.frozensets(st.sampled_from("abcde"))
#: The wanted names, the names that are requested again, whether requests are sent, and whether the stream breaks.
_STEPS = st.lists(st.tuples(_NAMES, _NAMES, st.booleans(), st.booleans()), max_size=8)


@settings(max_examples=examples(200), deadline=None)
@given(_STEPS, st.sampled_from([DeltaClient, SotwClient]))
def test_changes_make_the_requests_that_whole_sets_make(
    steps: list[tuple[frozenset[str], frozenset[str], bool, bool]], kind: type[DeltaClient] | type[SotwClient]
) -> None:
    whole, changed = kind(ClientOptions(node=Node(id="n"))), kind(ClientOptions(node=Node(id="n")))
    whole.stream_opened()
    changed.stream_opened()
    wanted: frozenset[str] = frozenset()
    for names, again, sends, breaks in steps:
        whole.want(EDS, names, again=again & names)
        changed.change(EDS, names - wanted, wanted - names, again & names)
        wanted = names
        if breaks:
            for client in (whole, changed):
                client.stream_closed()
                client.stream_opened()
        if sends:
            assert whole.requests_to_send() == changed.requests_to_send()
    assert whole.requests_to_send() == changed.requests_to_send()
