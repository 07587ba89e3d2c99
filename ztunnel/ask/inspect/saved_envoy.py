"""Answers ``/explain`` questions from a dump of Envoy's dialect, ours or an Envoy's, like ``saved.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xds.model.address import SocketAddress
from ztunnel.ask.inspect.envoy_listeners import read_configuration
from ztunnel.proxy.envoy.path.explain import Answer, Question, client_address, explain
from ztunnel.runtime.clock import Clock


class BadQuestion(ValueError):
    """In a question, an end of the connection is not an address, or the listener does not exist; the text says
    which.
    """


class SavedEnvoy:
    """The configuration in a dump of Envoy's dialect; the counterpart of
    :class:`~ztunnel.ask.inspect.saved.SavedMesh`.
    """

    def __init__(self, dump: Mapping[str, Any], clock: Clock) -> None:
        """Read a dump.

        Raises:
            ConfigError: it does not have the form of a dump.
        """
        self._configuration, self._lacks = read_configuration(dump, clock)

    def ask(self, asked: Mapping[str, str]) -> Answer:
        """Return the answer to a question, given as the parameters of ``/explain``.

        Raises:
            BadQuestion: an end is not an address, or the listener does not exist.
        """
        try:
            wanted = Question(
                source=client_address(asked.get("source", "")),
                destination=SocketAddress.parse(asked.get("destination", "")),
                identity=asked.get("identity", ""),
                listener=asked.get("listener", ""),
            )
            answer = explain(wanted, self._configuration)
        except ValueError as error:
            raise BadQuestion(str(error)) from None
        except LookupError as error:
            raise BadQuestion(str(error.args[0])) from None
        return answer | {"not_in_the_dump": self._lacks}
