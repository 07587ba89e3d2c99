"""The start of a proxy in Envoy's dialect: a bug in it ends the process, which a supervisor sees."""

import asyncio
from pathlib import Path

import pytest

from ztunnel.proxy.envoy.app import Proxy
from ztunnel.proxy.envoy.config.bootstrap import bootstrap_for, read_bootstrap
from ztunnel.proxy.envoy.config.settings import Settings
from ztunnel.runtime.tasks import errors_of


def test_a_bug_in_the_start_ends_the_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        bootstrap = bootstrap_for(f"unix:{tmp_path}/xds", "n", delta=False, admin=None)
        settings = Settings(
            control_plane="x", node="n", admin=None, readiness=None, metrics=None, drain_s=1.0, shutdown_s=1.0
        )
        proxy = Proxy(settings, read_bootstrap(bootstrap))

        def fail(*args: object) -> None:
            raise LookupError("a bug")

        monkeypatch.setattr(proxy, "_discover", fail)
        async with asyncio.timeout(60):
            with pytest.raises(BaseExceptionGroup) as ended:  # the clients' task groups wrap it
                await proxy.run()
        assert [type(error) for error in errors_of(ended.value)] == [LookupError]

    asyncio.run(main())
