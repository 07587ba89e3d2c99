"""Which lines are counted, and for which package."""

from collections import Counter

from tests.lines import counted, package_of, table


def test_generated_messages_blank_lines_and_comments_do_not_count() -> None:
    files = [
        ("ztunnel/proxy/envoy/app.py", '"""One."""\n\n# Why.\nvalue = 1  # two\n'),
        ("ztunnel/cli.py", "one\n"),
        ("xds/proto/envoy/type_pb2.py", "one\n"),
        ("setup.py", "one\n"),
    ]
    assert counted(iter(files)) == {"ztunnel/proxy/envoy": 2, "ztunnel": 1, "(top)": 1}
    assert package_of("xds/proto/registry.py") == "xds/proto"


def test_sums_are_of_product_tests_and_all() -> None:
    rows = [
        row.split() for row in table(Counter({"ztunnel": 5, "bench": 1}), Counter({"hbone": 2, "tests/life": 3}))
    ]
    assert rows[1:] == [
        ["bench", "1", "0", "-1"],
        ["hbone", "0", "2", "+2"],
        ["tests/life", "0", "3", "+3"],
        ["ztunnel", "5", "0", "-5"],
        ["product", "5", "2", "-3"],
        ["tests", "0", "3", "+3"],
        ["all", "6", "5", "-1"],
    ]
