"""Rows of the demo's tables: no line is wider than a terminal, and nothing is cut."""

from deploy.demo.stage import COLUMNS, row


def test_a_row_that_fits_is_one_line_in_columns() -> None:
    assert row(("worker ", "", "to 10.244.1.10:9080  ", "3 ms  ")) == "      worker   to 10.244.1.10:9080    3 ms"


def test_parts_that_do_not_fit_continue_below_and_are_not_cut() -> None:
    parts = (
        f"to spiffe/bookinfo-productpage/10.244.1.10:9080{'':30}",
        "9" * 60,
        "as productpage -> reviews",
        "8" * 60,
    )
    lines = row(parts).splitlines()
    assert max(map(len, lines)) <= COLUMNS
    assert "".join(lines).replace(" ", "") == "".join(parts).replace(" ", "")
    assert len(lines) == 3


def test_a_part_that_is_wider_than_a_line_has_a_line_of_its_own() -> None:
    assert row(("a", "b" * 200, "c")).splitlines() == ["      a", f"{'':14}{'b' * 200}", f"{'':14}c"]
