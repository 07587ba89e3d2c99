from xds.proto.well_known import Any as AnyMessage
from xds.protocol.interest import Change, Interest
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


def test_complete_updates_reach_every_subscriber() -> None:
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
    interest.tell()
    interest.set("two", "abcx")
    assert names(interest.known("two")) == "b"


def test_a_name_dropped_and_wanted_again_before_the_server_knows_is_served() -> None:
    interest: Interest[str] = Interest(EDS)
    interest.set("one", "a")
    interest.accepted(update("a"))
    interest.remove("one")
    interest.set("two", "a")
    interest.tell()
    assert names(interest.known("two")) == "a"


def test_complete_updates_replace_what_is_known() -> None:
    interest: Interest[str] = Interest(CDS)
    interest.set("one", None)
    interest.accepted(update("ab", type_url=CDS))
    interest.accepted(update("b", type_url=CDS))
    interest.set("two", None)
    assert names(interest.known("two")) == "b"


def test_the_server_is_told_only_what_changed() -> None:
    interest: Interest[str] = Interest(EDS)
    interest.set("one", "ab")
    interest.set("two", "bc")
    assert interest.tell() == Change(added=set("abc"))
    assert not interest.tell()
    interest.set("one", "bx")
    interest.remove("two")
    assert interest.tell() == Change(added=set("x"), dropped=set("ac"))
    interest.set("three", "y")
    interest.remove("three")
    assert not interest.tell()


def test_the_wildcard_can_be_added_and_removed() -> None:
    interest: Interest[str] = Interest(EDS)
    interest.set("one", "a")
    interest.tell()
    interest.accepted(update("a"))
    interest.set("all", None)
    assert interest.wants_all
    assert interest.tell() == Change(everything=True)
    interest.accepted(update("az"))
    interest.set("two", "b")
    assert not interest.tell()
    interest.remove("all")
    assert interest.tell().everything
    assert interest.union() == frozenset("ab")
    interest.set("late", "az")
    assert names(interest.known("late")) == "a"


class CountingName(str):
    """A name that counts how often anything looks at it."""

    __slots__ = ()
    looks = 0

    def __hash__(self) -> int:
        CountingName.looks += 1
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        CountingName.looks += 1
        return str.__eq__(self, other)


def looks_of_one_change(subscriptions: int) -> int:
    interest: Interest[int] = Interest(EDS)
    for number in range(subscriptions):
        interest.set(number, [CountingName(f"n{number}")])
    interest.tell()
    body = AnyMessage(type_url=EDS)
    first = Resource(name=CountingName("n0"), version="1", body=body)
    CountingName.looks = 0
    interest.set(subscriptions, [CountingName("new")])
    interest.tell()
    assert interest.known(subscriptions) is None
    whole = Update(type_url=EDS, version="1", resources=(first,))
    for _, part in interest.split(whole):
        interest.accepted(part)
    interest.remove(subscriptions)
    interest.tell()
    return CountingName.looks


def test_a_change_costs_the_same_among_many_subscriptions_as_among_few() -> None:
    assert looks_of_one_change(2000) <= looks_of_one_change(20) + 5
