"""Labels that Helm alone knows, or that only the charts set, for comparisons of a chart with a kustomization."""

from typing import Any

#: Labels that Helm sets for a release.
OF_HELM = frozenset({"app.kubernetes.io/managed-by", "helm.sh/chart"})
#: Those of Istio's charts.
STANDARD = OF_HELM | {
    "app.kubernetes.io/instance",
    "app.kubernetes.io/part-of",
    "app.kubernetes.io/version",
    "istio.io/rev",
}


def without(document: Any, names: frozenset[str]) -> Any:
    """Return a document without these labels, at any depth."""
    if isinstance(document, dict):
        return {
            key: {k: v for k, v in value.items() if k not in names} if key == "labels" else without(value, names)
            for key, value in document.items()
        }
    return [without(each, names) for each in document] if isinstance(document, list) else document
