from google.protobuf.any_pb2 import Any as AnyMessage

from xds.protocol.interest import Interest
from xds.protocol.resource import Resource, Update
from xds.protocol.types import CDS, EDS


def update(names: str, *, removed: str = "", version: str = "1", type_url: str = EDS) -> Update:
    resources = tuple(Resource(name=n, version=version, body=AnyMessage(type_url=type_url)) for n in names)
    return Update(
        type_url=type_url, version=version, resources=resources, removed=tuple(removed), complete=type_url == CDS
    )


def names(part: Update | None) -> str:
    return "" if part is None else "".join(sorted(resource.name for resource in part.resources))


def test_union_of_names_and_of_all() -> None:
    interest: Interest[str] = Interest(EDS)
    assert interest.union() == frozenset()
    interest.set("one", "ab")
    interest.set("two", "bc")
    assert interest.union() == frozenset("abc")
    interest.set("three", None)
    assert interest.union() is None
    interest.remove("three")
    interest.remove("two")
    assert interest.union() == frozenset("ab")


def test_each_gets_its_part_and_the_unconcerned_nothing() -> None:
    interest: Interest[str] = Interest(EDS)
    interest.set("one", "ab")
    interest.set("two", "c")
    interest.set("all", None)
    parts = dict(interest.split(update("ax", removed="b")))
    assert set(parts) == {"one", "all"}
    assert (names(parts["one"]), parts["one"].removed) == ("a", ("b",))
    assert names(parts["all"]) == "ax"


def test_complete_updates_concern_everybody() -> None:
    interest: Interest[str] = Interest(CDS)
    interest.set("one", "a")
    (part,) = interest.split(update("", type_url=CDS))
    assert part[1].complete


def test_a_late_subscriber_gets_what_is_known() -> None:
    interest: Interest[str] = Interest(EDS)
    interest.set("one", "ab")
    interest.accepted(update("ab", version="7"))
    interest.set("two", "bc")
    known = interest.known("two")
    assert names(known) == "b"
    assert known is not None
    assert (known.version, known.complete) == ("7", False)
    interest.set("three", "z")
    assert interest.known("three") is None
    assert interest.known("nobody") is None


def test_what_is_removed_or_unwanted_is_forgotten() -> None:
    interest: Interest[str] = Interest(EDS)
    interest.set("one", "abc")
    interest.accepted(update("abc"))
    interest.accepted(update("", removed="a"))
    interest.set("one", "bx")
    interest.forget_unwanted()
    interest.set("two", "abcx")
    assert names(interest.known("two")) == "b"


def test_a_name_dropped_and_wanted_again_before_the_server_knows_is_served() -> None:
    interest: Interest[str] = Interest(EDS)
    interest.set("one", "a")
    interest.accepted(update("a"))
    interest.remove("one")
    interest.set("two", "a")
    interest.forget_unwanted()
    assert names(interest.known("two")) == "a"


def test_complete_updates_replace_what_is_known() -> None:
    interest: Interest[str] = Interest(CDS)
    interest.set("one", None)
    interest.accepted(update("ab", type_url=CDS))
    interest.accepted(update("b", type_url=CDS))
    interest.set("two", None)
    assert names(interest.known("two")) == "b"
