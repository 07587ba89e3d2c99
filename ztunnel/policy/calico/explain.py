"""Explains a decision as a tree of lines: the tiers, policies and rules that the evaluation went through. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from xds.model import calico as c
from ztunnel.policy.calico.evaluator import Evaluator
from ztunnel.policy.calico.store import Store
from ztunnel.policy.calico.verdict import PROFILE_TIER, Verdict, identity_of
from ztunnel.policy.calico.walk import Outcome, Step, walk

#: The prefix of the profile names of service accounts. The namespace and the account's name follow.
_OF_ACCOUNT: Final = "ksa."
#: The source port of a connection if none is given: the first ephemeral port (RFC 6335, 6).
EPHEMERAL_PORT: Final = 49152


@dataclass(frozen=True, slots=True)
class Party:
    """One party of a question: the source or the destination of a flow.

    Attributes:
        name: the printed name.
        endpoint: the pod's endpoint. None if the party is not a known pod.
        address: the party's address. None if only an identity was given.
    """

    name: str
    endpoint: c.EndpointId | None
    address: str | None
    principal: str = ""


class UnknownParty(ValueError):
    """A text is not a pod, an address or a SPIFFE id."""


class BadQuestion(ValueError):
    """A question is invalid. The text names the parameter."""


def explain(
    made: Evaluator, flow: c.Flow, endpoint: c.EndpointId, direction: c.Direction, *, enforced: bool = True
) -> tuple[Verdict, list[str]]:
    """Return the verdict about a flow to or from an endpoint, and lines that explain it."""
    verdict = made.check(endpoint, flow, direction, enforced=enforced)
    identities = tuple(
        identity_of(principal, frozenset()) for principal in (flow.source_principal, flow.destination_principal)
    )
    lines = [f"{direction} of {endpoint.workload}"]
    source, destination = identities
    if source is not None and destination is not None and made.store.in_sync:
        steps = walk(
            made.store,
            made.store.endpoints[endpoint],
            flow,
            (source, destination),
            direction,
            enforced=enforced,
            connections_only=made.connections_only,
        ).steps
        lines += _tree(steps)
    lines.append(f"  => {'allowed by ' + str(verdict.rule) if verdict.allowed else verdict.message}")
    return verdict, lines


def explain_both(
    made: Evaluator, flow: c.Flow, source: Party, destination: Party, *, enforced: bool = True
) -> tuple[bool, list[str]]:
    """Return whether both ends allow a flow, and the lines that explain both decisions."""
    allowed, lines = True, []
    for end, direction in ((source, c.Direction.EGRESS), (destination, c.Direction.INGRESS)):
        if end.endpoint is None:
            lines += [f"{direction} of {end.name}", "  no pod here: no policy"]
            continue
        verdict, more = explain(made, flow, end.endpoint, direction, enforced=enforced)
        lines += more
        allowed = allowed and verdict.allowed
    return allowed, lines


def answer(made: Evaluator, asked: Mapping[str, str]) -> tuple[bool, list[str]]:
    """Return the answer to a question that was sent to a running server.

    Args:
        made: the server's evaluator.
        asked: ``from`` and ``to`` as for ``ztunnel policy explain``; ``port``, ``source_port``, ``protocol``,
            ``method``, ``path``, ``staged`` (``true``) and ``trust_domain``, each optional.

    Raises:
        BadQuestion: a parameter is missing, unknown or invalid.
    """
    known = ("from", "to", "port", "source_port", "protocol", "method", "path", "staged", "trust_domain")
    for name in asked:
        if name not in known:
            raise BadQuestion(f"{name}: unknown; there are {', '.join(known)}")
    ends = []
    for name in ("from", "to"):
        try:
            ends.append(_party(asked.get(name, ""), made.store, asked.get("trust_domain") or "cluster.local"))
        except UnknownParty as error:
            raise BadQuestion(f"{name}: {error}") from None
    if asked.get("staged", "false") not in ("true", "false"):
        raise BadQuestion("staged: must be true or false")
    source, destination = ends
    flow = flow_of(
        source,
        destination,
        asked.get("port") or "",
        asked.get("protocol") or "tcp",
        asked.get("method"),
        asked.get("path"),
        source_port=asked.get("source_port") or "",
    )
    return explain_both(made, flow, source, destination, enforced=asked.get("staged") != "true")


def flow_of(
    source: Party,
    destination: Party,
    port: str,
    protocol: str,
    method: str | None,
    path: str | None,
    *,
    source_port: str = "",
) -> c.Flow:
    """Return the flow between two parties; without method and path it is a connection.

    Args:
        port: the destination's port, 80 if empty. For ICMP it is a type, see :func:`icmp_of`; any type if empty.
        source_port: :data:`EPHEMERAL_PORT` if empty.

    Raises:
        BadQuestion: a port or the protocol is invalid.
    """
    number = protocol_of(protocol)
    http = method is not None or path is not None
    is_icmp = number in c.ICMP_PROTOCOLS.values()
    return c.Flow(
        source_ip=source.address,
        destination_ip=destination.address,
        source_port=0 if is_icmp else port_of("source_port", source_port or str(EPHEMERAL_PORT)),
        destination_port=0 if is_icmp else port_of("port", port or "80"),
        protocol=number,
        icmp=icmp_of(port) if is_icmp and port else None,
        source_principal=source.principal,
        destination_principal=destination.principal,
        method=(method or "") if http else None,
        path=(path or "") if http else None,
    )


def protocol_of(text: str) -> int:
    """Return the number of an IP protocol, given by name or number.

    Raises:
        BadQuestion: the text is neither.
    """
    number = c.PROTOCOLS.get(text.lower())
    if number is None and text.isascii() and text.isdigit() and len(text) <= 3:
        number = int(text)
    if number is None or not 0 < number < 256:
        raise BadQuestion(f"{text!r} is no IP protocol")
    return number


def port_of(name: str, text: str) -> int:
    """Return a port, given as text.

    Raises:
        BadQuestion: the text is not a port; the error names the parameter.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65536):
        raise BadQuestion(f"{name}: {text!r} is no port")
    return int(text)


def port_text(flow: c.Flow) -> str:
    """Return the destination's port of a flow in words, or for ICMP the type."""
    if flow.protocol not in c.ICMP_PROTOCOLS.values():
        return f"port {flow.destination_port}"
    return "any type" if flow.icmp is None else f"type {flow.icmp[0]}, code {flow.icmp[1]}"


def icmp_of(text: str) -> tuple[int, int]:
    """Return the type and the code in a text ``TYPE`` or ``TYPE/CODE`` for ICMP. The default code is 0.

    Raises:
        BadQuestion: the text has another form.
    """
    kind, _, code = text.partition("/")
    numbers = [int(part) for part in (kind, code or "0") if part.isascii() and part.isdigit() and len(part) <= 3]
    if len(numbers) != 2 or max(numbers) > 255:
        raise BadQuestion(f"port: {text!r} is no type of ICMP, nor a type and a code such as 3/4")
    return numbers[0], numbers[1]


def _party(text: str, store: Store, trust_domain: str) -> Party:
    """Look up a ``namespace/pod``, an IP address or a SPIFFE id in a store.

    Raises:
        UnknownParty: the text is none of these.
    """
    if text.startswith("spiffe://"):
        return Party(text, None, None, text)
    if "/" in text:
        found = next((key for key in store.endpoints if key.workload == text), None)
        if found is None:
            raise UnknownParty(f"there is no pod {text}")
    else:
        try:
            wanted = str(ip_address(text))
        except ValueError:
            raise UnknownParty(f"{text!r} is neither namespace/pod, an IP address nor a SPIFFE id") from None
        found = store.endpoint_at(wanted)
        if found is None:
            return Party(wanted, None, wanted)
    endpoint = store.endpoints[found]
    namespace = found.workload.partition("/")[0]
    prefix = f"{_OF_ACCOUNT}{namespace}."
    accounts = [name.removeprefix(prefix) for name in endpoint.profiles if name.startswith(prefix)]
    principal = f"spiffe://{trust_domain}/ns/{namespace}/sa/{accounts[0]}" if accounts else ""
    address = str(endpoint.addresses[0].network_address) if endpoint.addresses else None
    return Party(found.workload, found, address, principal)


def _tree(steps: list[Step]) -> Iterator[str]:
    tier, policy = None, None
    for step in steps:
        place = step.place
        if place.tier != tier:
            tier, policy = place.tier, None
            yield "  profiles" if tier == PROFILE_TIER else f"  tier {tier}"
        if place.index < 0 and step.outcome not in (Outcome.STAGED, Outcome.UNDECIDABLE):
            yield f"    end of tier: {step.outcome}"
            continue
        if place.policy != policy:
            policy = place.policy
            yield f"    {policy}"
        if place.index < 0:
            yield f"      {step.outcome}{': ' + step.clause if step.clause else ', not enforced'}"
        else:
            yield f"      rule {place.index}: {step.outcome}{': ' + step.clause if step.clause else ''}"
