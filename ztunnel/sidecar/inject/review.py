"""Answers an AdmissionReview of the API server. Pure: bytes in, status and bytes out.

A request that is not a review gets an HTTP error, like from Istio's injector. A review is always answered with
200. A pod that must not be created is refused inside the answer, with a text for its author.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import unquote

from ztunnel.sidecar.inject.config import InjectConfig
from ztunnel.sidecar.inject.decision import mapping
from ztunnel.sidecar.inject.inject import Denied, inject
from ztunnel.sidecar.inject.patch import diff

#: The longest body of a request: twice etcd's limit, as in Istio, because a review has an object and its old
#: state.
MAX_BODY: Final = 3 * 1024 * 1024
_URL_NAMES: Final = {"cluster": ("CLUSTER_ID", "ISTIO_META_CLUSTER_ID"), "net": ("NETWORK",)}
_VERSIONS: Final = ("admission.k8s.io/v1", "admission.k8s.io/v1beta1")


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer to a review.

    Attributes:
        result: for logs and metrics: ``injected``, ``skipped``, ``denied`` or ``bad-request``.
        about: the pod, and the reason for the result.
    """

    status: int
    content_type: str
    body: bytes
    result: str
    about: str


def answer(body: bytes, content_type: str, config: InjectConfig, path: str = "") -> Answer:
    """Return the answer to the body of a request. ``path`` is the part of the URL after ``/inject``."""
    if content_type != "application/json":
        return _bad(415, f"Content-Type must be application/json, not {content_type!r}")
    if not body:
        return _bad(400, "the body is empty; it must be an AdmissionReview")
    if len(body) > MAX_BODY:
        return _bad(400, f"the body is larger than {MAX_BODY} bytes")
    try:
        review = json.loads(body)
    except (ValueError, RecursionError) as error:
        # The pod is refused, so that none is created outside of the mesh by accident. The API server prints the
        # text.
        return _review(_VERSIONS[0], {"uid": "", **_denial(f"the AdmissionReview cannot be read: {error}")}, "?")
    version = review.get("apiVersion") if isinstance(review, dict) else None
    request = review.get("request") if isinstance(review, dict) else None
    if version not in _VERSIONS or not isinstance(request, Mapping):
        said = f"not an AdmissionReview of {' or '.join(_VERSIONS)} with a request, but apiVersion {version!r}"
        return _review(_VERSIONS[0], {"uid": "", **_denial(said)}, "?")
    uid = str(request.get("uid", ""))
    pod = request.get("object")
    if not isinstance(pod, dict) or mapping(request, "kind").get("kind", "Pod") != "Pod":
        return _review(version, {"uid": uid, **_denial("the request's object is not a pod")}, "?")
    namespace = str(request.get("namespace") or mapping(pod, "metadata").get("namespace") or "")
    name = f"{namespace}/{pod_name(pod)}"
    try:
        variables, templates = url_parts(path)
        config = replace(config, templates=templates) if templates else config
        outcome = inject(pod, namespace, config, variables)
    except Denied as error:
        return _review(version, {"uid": uid, **_denial(str(error))}, name)
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if outcome.warnings:
        response["warnings"] = list(outcome.warnings)
    patch = diff(pod, outcome.pod)
    if patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(json.dumps(patch, separators=(",", ":")).encode()).decode()
    return _review(version, response, f"{name}: {outcome.decision.reason}")


def url_parts(path: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the environment of sidecars, and the templates for pods that name none, from a webhook's URL.

    Like in Istio, a URL has pairs of names and values such as ``/cluster/east/net/west``. In a value,
    ``--slash--`` stands for ``/``. A name without a value is ignored. ``cluster`` and ``net`` set variables of
    their own, other names are converted to capitals. ``/templates/a,b`` exists only here, because two
    configurations can call one injector.
    """
    parts = [unquote(part) for part in path.split("/") if part]
    found: dict[str, str] = {}
    templates: tuple[str, ...] = ()
    for name, value in zip(parts[::2], parts[1::2], strict=False):
        if name == "templates":
            templates = tuple(each.strip() for each in value.split(",") if each.strip())
            continue
        text = value.replace("--slash--", "/")
        for variable in _URL_NAMES.get(name, (name.upper(),)):
            found[variable] = text
    return found, templates


def pod_name(pod: Mapping[str, Any]) -> str:
    """Return a pod's name for logs. A controller's pod has only a prefix of its name until it is stored."""
    metadata = mapping(pod, "metadata")
    name = metadata.get("name")
    return str(name) if name else f"{metadata.get('generateName', '')}***** (name not known)"


def _denial(message: str) -> dict[str, Any]:
    return {"allowed": False, "status": {"message": message}}


def _review(version: str, response: Mapping[str, Any], about: str) -> Answer:
    if not response["allowed"]:
        result, about = "denied", f"{about}: {response['status']['message']}"
    else:
        result = "injected" if "patch" in response else "skipped"
    # The answer has the request's version, because the API server refuses an answer in another version.
    body = json.dumps({"apiVersion": version, "kind": "AdmissionReview", "response": response}).encode()
    return Answer(200, "application/json", body, result, about)


def _bad(status: int, message: str) -> Answer:
    return Answer(status, "text/plain; charset=utf-8", f"{message}\n".encode(), "bad-request", message)
