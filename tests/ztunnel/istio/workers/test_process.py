"""What the main process makes of a worker's output, and what it hands down."""

import asyncio
import os
from pathlib import Path

from tests.ztunnel.istio.nodes import Lines
from ztunnel.istio.workers.process import OutputReader, without_credentials


def test_lines_of_several_workers_stay_whole(tmp_path: Path) -> None:
    lines = Lines(tmp_path, "info", json_lines=False)

    async def main() -> None:
        pipes = [os.pipe() for _ in range(2)]
        read = [OutputReader(reading, lines.stream) for reading, _ in pipes]
        loop = asyncio.get_running_loop()
        for number in range(200):
            # Cut anywhere, and larger than a pipe writes in one piece.
            for worker, (_, writing) in enumerate(pipes):
                data = b"%d %d " % (worker, number) + b"x" * 9000 + b"\n"
                cut = (number * 37) % len(data)
                for part in (data[:cut], data[cut:]):
                    await loop.run_in_executor(None, os.write, writing, part)
        os.write(pipes[0][1], b"0 last, and it died in the midd")
        for _, writing in pipes:
            os.close(writing)
        async with asyncio.timeout(5):
            for each in read:
                await each.ended.wait()

    asyncio.run(main())
    found = list(lines)
    lines.close()
    assert [line for line in found if "last" in line] == ["0 last, and it died in the midd"]
    whole = [line for line in found if "last" not in line]
    assert len(whole) == 400
    for worker in range(2):
        own = [line for line in whole if line.startswith(f"{worker} ")]
        assert own == [f"{worker} {number} " + "x" * 9000 for number in range(200)]


def test_workers_are_not_handed_credentials() -> None:
    env = {"PATH": "/bin", "AUTH_TOKEN": "t", "XDS_HEADER_X": "h", "CA_HEADER_Y": "h", "NODE_NAME": "n"}
    assert without_credentials(env) == {"PATH": "/bin", "NODE_NAME": "n"}
