"""Log rotation: SIGUSR1 reopens access logs, SIGHUP changes nothing, and no connection ends."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

from tests.ports import free_port
from tests.ztunnel.proxy.envoy.harness import WAIT_S, Open, access_log, application, ask
from tests.ztunnel.proxy.envoy.test_handover import bootstrap, generation, live


def test_signals_of_rotation_reopen_logs_and_end_no_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with application() as application_port:
            admin, port = free_port(), free_port()
            path = bootstrap(tmp_path, admin, port, application_port)
            document = json.loads(path.read_text())
            document["static_resources"]["listeners"][0]["access_log"] = access_log(tmp_path)
            path.write_text(json.dumps(document))
            log, rotated = tmp_path / "log", tmp_path / "log.1"
            async with generation(path, 0) as process:
                await live(admin, 0)
                held = await Open.to(port)
                assert await held.say(b"one") == b"one"
                assert await ask(port) == b"ping"
                log.rename(rotated)
                process.send_signal(signal.SIGHUP)
                process.send_signal(signal.SIGUSR1)
                async with asyncio.timeout(WAIT_S):
                    while not log.exists():
                        await asyncio.sleep(0.01)
                assert len(rotated.read_text().splitlines()) == 1
                assert await held.say(b"two") == b"two"
                await held.close()
                process.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
            assert len(log.read_text().splitlines()) == 1

    asyncio.run(main())
