"""Limits of waits in tests."""

from typing import Final

#: After this time a test that waits for something reports a hang. A busy machine can delay any process by seconds.
WAIT_S: Final = 60.0
