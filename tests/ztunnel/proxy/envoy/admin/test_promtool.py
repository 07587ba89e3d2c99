"""Both pages in the eyes of Prometheus's own checker, as a whole proxy prints them."""

from tests.programs import metrics_lint
from tests.ztunnel.proxy.envoy.admin.harness import Running, serve
from tests.ztunnel.proxy.envoy.admin.reference import Reference

#: What the checker dislikes about Envoy's names, which dashboards know and which stay.
OF_NAMES = (
    'counter metrics should have "_total" suffix',
    'non-counter metrics should not have "_total" suffix',
    "metric names should not contain abbreviated units",
    'use base unit "seconds" instead of "days"',
)


def test_pages_are_metrics_with_envoys_names(reference: Reference) -> None:
    pages: list[str] = []

    def ask(running: Running) -> None:
        pages.extend((running.metrics.get("/metrics").text, running.admin.get("/stats/prometheus").text))

    serve(reference, ask)
    for page, also in zip(pages, ((), ("no help text",)), strict=True):  # Envoy's own page has no help
        complaints = [line for line in metrics_lint(page) if not line.endswith((*OF_NAMES, *also))]
        assert complaints == []
