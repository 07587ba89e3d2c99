"""Finds modules by their earlier names, from before the tree was grouped, for scripts outside of this repository.
Commands and entry points never had these names. An earlier name leads to the module under its present name, not to
a second copy.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

#: For each earlier package, the present packages in search order.
_PACKAGES: Final = {
    "agent": ("node.agent",),
    "authz": ("policy.authz",),
    "calico": ("policy.calico",),
    "dataplane": ("proxy.dataplane",),
    "envoy": tuple(
        f"proxy.envoy{folder}" for folder in ("", ".path", ".stream", ".config", ".listeners", ".stats")
    ),
    "http": ("runtime.http",),
    "identity": ("proxy.identity",),
    "init": ("sidecar.init",),
    "inject": ("sidecar.inject",),
    "inspect": ("ask.inspect",),
    "intercept": ("node.intercept",),
    "istio": tuple(f"proxy.istio{folder}" for folder in ("", ".path", ".accounting", ".settings")),
    "netpol": ("policy.netpol",),
    "otlp": ("proxy.otlp",),
    "policysync": ("policy.policysync",),
    "simulate": ("ask.simulate",),
    "tap": ("proxy.tap",),
    "ui": ("proxy.ui",),
}
#: For modules that were in ``ztunnel.runtime``, their present packages.
_OF_RUNTIME: Final = {
    **dict.fromkeys(
        ("config_reader", "file_kinds", "go_flags", "go_values", "go_yaml", "object_lists"), "runtime.formats"
    ),
    **dict.fromkeys(("arguments", "proxy_flags", "subcommands", "terminal", "text_table"), "runtime.console"),
    **dict.fromkeys(("client_hello", "half_open"), "proxy.dataplane"),
    "capture_lists": "sidecar",
}
#: For modules that were also renamed, their present names.
_RENAMED: Final = {"half_open": "handshake_limiter", "log_fields": "line_rendering", "metrics_page": "families"}


class EarlierNames:
    """A finder and loader of :data:`sys.meta_path`.

    It precedes other finders, because a package with an earlier name has the path of the present package, where
    other finders would find a second copy of each module.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Return a spec for a module with an earlier name, or None for any other name."""
        for candidate in _candidates(name):
            from importlib.util import find_spec  # costs each start of a proxy time that only old scripts need

            try:
                found = find_spec(candidate)
            except ModuleNotFoundError:
                continue
            if found is not None:
                # This class has no base class, because importing importlib.abc takes longer than importing this
                # module.
                loader: Any = self
                is_package = found.submodule_search_locations is not None
                return ModuleSpec(name, loader, origin=candidate, is_package=is_package)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module under its present name."""
        assert spec.origin is not None
        module = importlib.import_module(spec.origin)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the import by the earlier name has replaced."""
        spec = module.__spec__
        if spec is not None and spec.loader_state is not None:
            module.__spec__ = spec.loader_state


def _candidates(name: str) -> Iterator[str]:
    root, _, rest = name.partition(".")
    package, _, inner = rest.partition(".")
    if root != "ztunnel":
        return
    packages = _PACKAGES.get(package, ())
    if package == "runtime" and inner in _OF_RUNTIME:
        packages = (_OF_RUNTIME[inner],)
    for module in (inner, _RENAMED[inner]) if inner in _RENAMED else (inner,):
        for present in packages:
            yield f"{root}.{present}" + (f".{module}" if module else "")


def install() -> None:
    """Make imports find modules by their earlier names; idempotent."""
    if not any(isinstance(finder, EarlierNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, EarlierNames())
