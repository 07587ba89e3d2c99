"""Events: rates, bounds, and the order of what is shown."""

import json

from tests.ztunnel.proxy.ui.values import connection, flow, seen, workload
from ztunnel.proxy.ui.view import LONGEST_TEXT, Bounds, Rates, event


def test_rates_are_of_the_time_since_the_event_before() -> None:
    rates = Rates()
    (first,) = rates.of([flow()], 100.0, 9)
    assert (first["connections_per_s"], first["bytes_per_s"]) == (None, None)
    (second,) = rates.of([flow(opened=14, failed=3, bytes_sent=1500, bytes_received=5500)], 102.0, 9)
    assert (second["connections_per_s"], second["failures_per_s"], second["bytes_per_s"]) == (2.0, 0.5, 500.0)
    # A new flow began at 0. A flow with decreased counts belongs to a restarted proxy.
    new, again = rates.of([flow(source="shop/c", opened=8), flow(opened=1, bytes_sent=0)], 104.0, 9)
    assert (new["source"], new["connections_per_s"]) == ("shop/c", 4.0)
    assert (again["connections_per_s"], again["bytes_per_s"]) == (0.0, 0.0)


def test_there_is_no_rate_without_a_sample_of_the_last_minute() -> None:
    rates = Rates()
    rates.of([flow()], 100.0, 9)
    (late,) = rates.of([flow(opened=1000)], 161.0, 9)
    assert late["connections_per_s"] is None
    (same_moment,) = rates.of([flow(opened=2000)], 161.0, 9)
    assert same_moment["connections_per_s"] is None


def test_the_most_active_come_first_and_the_rest_is_counted() -> None:
    flows = [flow(source=f"shop/{number}", opened=number) for number in range(50)]
    names = [*(f"shop/{number}" for number in range(50)), "shop/b"]
    known = seen(
        flows=flows,
        workloads=[workload(name) for name in names],
        connections=[connection(number) for number in range(20)],
        connections_open=90,
    )
    bounds = Bounds(workloads=11, flows=10, connections=15, others=3)
    shown = event(known, Rates(), 1.0, 2.0, bounds)
    assert [each["source"] for each in shown["flows"]["shown"]] == [
        f"shop/{number}" for number in range(49, 39, -1)
    ]
    assert shown["flows"]["left_out"] == 40
    assert {each["key"] for each in shown["workloads"]["shown"]} == {"shop/b", *names[40:50]}
    assert shown["workloads"]["left_out"] == 40
    assert (len(shown["connections"]["shown"]), shown["connections"]["left_out"]) == (15, 75)


def test_every_flow_that_is_shown_has_both_workloads() -> None:
    flows = [flow(source=f"shop/{number}", destination=f"shop/x{number}") for number in range(9)]
    keys = [key for each in flows for key in (each.source, each.destination)]
    bounds = Bounds(workloads=5)
    shown = event(seen(flows=flows, workloads=[workload(key) for key in keys]), Rates(), 1.0, 2.0, bounds)
    drawn = {each["key"] for each in shown["workloads"]["shown"]}
    assert len(drawn) == 5
    assert [{each["source"], each["destination"]} <= drawn for each in shown["flows"]["shown"]] == [True, True]
    assert shown["flows"]["left_out"] == 7


def test_workloads_of_this_node_come_before_others_that_are_idle() -> None:
    known = seen(workloads=[workload("a/far"), workload("z/near", here=True)])
    assert [each["key"] for each in event(known, Rates(), 1.0, 2.0)["workloads"]["shown"]] == ["z/near", "a/far"]


def test_the_past_is_shown_whole() -> None:
    past = {"step_s": 10.0, "connections": list(range(90))}
    assert event(seen(past=past), Rates(), 1.0, 2.0)["past"] == past


def test_an_event_is_bounded_whatever_names_are_like() -> None:
    """Hostile names are long, and many: an event of all bounds has less than 2 MB, JSON of ASCII alone."""
    long = "\u2028</script>\ud800" + "x" * 10_000
    many = range(2_000)
    known = seen(
        flows=[flow(source=f"{number}{long}", service=long) for number in many],
        workloads=[workload("shop/b"), *(workload(f"{number}{long}", name=long) for number in many)],
        connections=[connection(number) for number in many],
        connections_open=2_000,
    )
    text = json.dumps(event(known, Rates(), 1.0, 2.0))
    assert len(text) < 2_000_000
    assert text.isascii()
    assert "\n" not in text
    first = json.loads(text)["flows"]["shown"][0]
    assert len(first["service"]) == LONGEST_TEXT
    assert first["service"].endswith("…")
