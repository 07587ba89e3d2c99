"""Pages for Prometheus: negotiated, compressed, cut into slices."""

import gzip
import zlib
from collections.abc import Callable

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.samples import Sample

from ztunnel.runtime.http.exposition import Family, UnsuffixedCounter, accepts, page, process_families
from ztunnel.runtime.http.page import Page, PageRequest

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores"
TEXT = "text/plain; version=0.0.4; charset=utf-8"


def counted(number: int = 1) -> Family:
    samples = (Sample("a_total", {"n": str(each)}, each) for each in range(number))
    return Family(Metric("a", "Help.", "counter"), samples)


def page_of(*families: Family, accept: str = "", encoding: str = "") -> Page:
    return page(families, PageRequest(method="GET", path="/metrics", accept=accept, accept_encoding=encoding))


def text_of(*families: Family, accept: str = "") -> str:
    return b"".join(piece for piece in page_of(*families, accept=accept).body if isinstance(piece, bytes)).decode()


@pytest.mark.parametrize(
    ("accept", "content_type", "last"),
    [
        ("", TEXT, 'a_total{n="0"} 0.0'),
        ("text/plain", TEXT, 'a_total{n="0"} 0.0'),
        ("*/*", TEXT, 'a_total{n="0"} 0.0'),
        ("application/openmetrics-text;version=1.0.0", OPENMETRICS, "# EOF"),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2", OPENMETRICS, "# EOF"),
        ("application/openmetrics-textual", TEXT, 'a_total{n="0"} 0.0'),
    ],
)
def test_the_format_is_the_one_asked_for(accept: str, content_type: str, last: str) -> None:
    answer = page_of(counted(), accept=accept)
    assert answer.content_type == content_type
    assert ("vary", "accept, accept-encoding") in answer.headers
    assert text_of(counted(), accept=accept).splitlines()[-1] == last


@pytest.mark.parametrize(("encoding", "unpack"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
def test_a_page_is_compressed_where_the_scraper_likes_it(encoding: str, unpack: Callable[[bytes], bytes]) -> None:
    answer = page_of(counted(), encoding=f"br, {encoding};q=0.5")
    assert ("content-encoding", encoding) in answer.headers
    packed = b"".join(piece for piece in answer.body if isinstance(piece, bytes))
    assert unpack(packed).decode() == text_of(counted())


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("gzip", True),
        ("GZIP", True),
        ("br, gzip", True),
        ("gzip;q=0", False),
        ("gzip; q=0.0", False),
        ("gzip;q=0.001", True),
        ("", False),
        ("x-gzip", False),
        ("*", False),
    ],
)
def test_accept_encoding_decides_about_gzip(header: str, accepted: bool) -> None:
    assert accepts(header, "gzip") is accepted


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text;version=1.0.0"])
@pytest.mark.parametrize("number", [0, 1, 99, 100, 101, 250])
def test_slices_make_one_family(accept: str, number: int) -> None:
    text = text_of(counted(number), accept=accept)
    assert text.count("# TYPE") == text.count("# HELP") == (1 if number else 0)
    assert text.count("a_total{") == number


def test_a_counter_without_the_suffix_keeps_name_and_type() -> None:
    def family() -> Family:
        return Family(UnsuffixedCounter("b", "Help."), [Sample("b", {}, 2)])

    assert text_of(family()) == "# HELP b Help.\n# TYPE b counter\nb 2.0\n"
    assert [each.type for each in parse_text(text_of(family()))] == ["counter"]
    assert "# TYPE b unknown\nb 2.0\n" in text_of(family(), accept="application/openmetrics-text")


def test_the_process_has_its_usual_names() -> None:
    found = {family.name for family in parse_text(text_of(*process_families((1,))))}
    assert {"process_cpu_seconds", "process_resident_memory_bytes", "process_open_fds"} <= found
