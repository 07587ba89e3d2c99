"""Forms of configuration text that Envoy's parser of YAML and protobuf JSON accepts, and their meaning.

Each form is part of a bootstrap. ``envoy --mode validate`` decides whether it is accepted. For accepted forms of
clusters, the configuration dump of a running Envoy shows the parsed values.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.interop.loopback import serving, until
from tests.interop.proxies import ENVOY
from tests.ports import free_port
from tests.ztunnel.proxy.envoy.harness import Json
from xds.errors import ConfigError
from xds.proto.envoy.config.bootstrap.v3.bootstrap_pb2 import Bootstrap
from xds.proto.json import parse_text, parse_value

_WORDS = {
    "SOURCE": "source_address: {address: 127.0.0.1, port_value: 0}",
    "T/": "type.googleapis.com/",
    "HTTP": "envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
    "TCP": "envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy",
}

_FOLDER = Path(__file__).parents[1] / "data" / "text_forms"
#: Fields of a cluster, in a flow mapping.
CLUSTERS = (_FOLDER / "clusters.txt").read_text().splitlines()
#: Whole bootstraps; ``\\n`` stands for a line break.
BOOTSTRAPS = (_FOLDER / "bootstraps.txt").read_text().splitlines()

#: The beginnings of forms about which the two differ on purpose, and why.
DIFFERENT = {
    "per_connection_buffer_limit_bytes: 5, perConn": "Envoy's hash table decides which is taken",
    '"@type": T/envoy.config.cluster': "it restates the type, as in files of resources",
    "static_resources:\\n  clusters:\\n  - &a": "merge keys are obeyed",
}


def text_of(form: str, name: str = "app") -> str:
    """Return the bootstrap of a form of a cluster."""
    return f"static_resources: {{clusters: [{cluster_of(form, name)}]}}"


def cluster_of(form: str, name: str) -> str:
    """Return the cluster of a form."""
    return f"{{name: {name}, type: STATIC, load_assignment: {{cluster_name: app}}, {_full(form)}}}"


def bootstrap_of(form: str) -> str:
    """Return the bootstrap of a whole form."""
    return _full(form).replace(r"\n", "\n")


def _full(form: str) -> str:
    for word, text in _WORDS.items():
        form = form.replace(word, text)
    return form


def accepted_by_envoy(texts: Iterable[str]) -> list[bool]:
    """Return whether Envoy takes each text for a bootstrap."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as two:

        def validate(numbered: tuple[int, str]) -> bool:
            number, text = numbered
            path = Path(folder) / f"{number}.yaml"
            path.write_text(text)
            command = [ENVOY, "-c", path, "--mode", "validate", "-l", "off", "--disable-hot-restart"]
            return subprocess.run(command, capture_output=True, check=False).returncode == 0

        return list(two.map(validate, enumerate(texts)))


def accepted_together(forms: list[str]) -> bool:
    """Return whether Envoy takes one bootstrap with all these clusters, so each of them."""
    return accepted_by_envoy(["static_resources:\n  clusters:\n" + _items(forms)])[0]


def _items(forms: list[str]) -> str:
    return "".join(f"  - {cluster_of(form, f'app{number}')}\n" for number, form in enumerate(forms))


def read_here(text: str) -> Bootstrap | None:
    """Return what our reader makes of a text in a file of YAML, ``None`` if it refuses it."""
    try:
        parsed = parse_text(text, Bootstrap, name="bootstrap.yaml")
    except ConfigError:
        return None
    return None if parsed.unknown_fields else parsed.message


def understood_by_envoy(forms: list[str]) -> list[Json]:
    """Return the clusters of accepted forms as a running Envoy shows them."""
    port = free_port()
    admin = f"{{address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}}}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bootstrap.yaml"
        path.write_text(f"admin: {admin}\nstatic_resources:\n  clusters:\n" + _items(forms))

        def dump() -> list[Json]:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/config_dump") as answer:
                configs: list[Json] = json.load(answer)["configs"]
            found: list[Json] = configs[0]["bootstrap"]["static_resources"]["clusters"]
            return found

        with serving("envoy", path, admin=True):
            until(lambda: _answers(port))
            return dump()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready"):
            return True
    except OSError:
        return False


def as_message(shown: list[Json]) -> Bootstrap:
    """Return a dump's clusters as a message of ours."""
    return parse_value({"static_resources": {"clusters": shown}}, Bootstrap).message
