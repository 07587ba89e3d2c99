"""What a case is: a stimulus, a function that applies it, and what every pairing must show."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar


class Opened(ABC):
    """What is opened in pieces, and closed whole, also when opening fails halfway."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    @abstractmethod
    def _open(self) -> None:
        """Open everything, each piece on the stack."""

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


#: What cases run on: :class:`tests.interop.site.Site`, or the site of a node proxy.
SiteT = TypeVar("SiteT")


@dataclass(frozen=True, kw_only=True)
class Case(Generic[SiteT]):
    """One row of a table.

    Attributes:
        number: the row's number in its table.
        stimulus: its description in a few words.
        run: applies it and returns the observation as a text that can be compared.
        expected: the expected text by column; a missing column does not apply.
        early: takes long and disturbs no other case; it starts with the site, so that its wait costs nothing.
    """

    number: str
    stimulus: str
    run: Callable[[SiteT], str]
    expected: Mapping[Any, str]
    early: bool = False


class Runner(Generic[SiteT]):
    """Runs cases of one column on its site. Those that are ``early`` run in the background from the start."""

    def __init__(self, site: SiteT, cases: Sequence[Case[SiteT]], column: object) -> None:
        early = [case for case in cases if case.early and column in case.expected]
        self._site = site
        self._pool = ThreadPoolExecutor(max(1, len(early)), thread_name_prefix="early")
        self._started: dict[str, Future[str]] = {case.number: self._pool.submit(case.run, site) for case in early}

    def run(self, case: Case[SiteT]) -> str:
        """Run a case; return what was seen. Failures of the test itself are raised."""
        started = self._started.get(case.number)
        return started.result() if started is not None else case.run(self._site)

    def close(self) -> None:
        """Wait for the cases that still run."""
        self._pool.shutdown()
