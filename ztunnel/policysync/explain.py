"""Explains a decision: the walk through tiers, policies and rules as a tree of lines. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address

from xds.model import calico as c
from ztunnel.calico.compile import Compiled, endpoint_id
from ztunnel.calico.evaluator import Evaluator
from ztunnel.calico.resources import Resources
from ztunnel.calico.store import Store
from ztunnel.calico.verdict import PROFILE_TIER, Verdict, identity_of
from ztunnel.calico.walk import Outcome, Step, walk
from ztunnel.policysync.view import View, changes, view_of


@dataclass(frozen=True, slots=True)
class Party:
    """One end of a flow that is asked about.

    Attributes:
        name: as it is printed.
        endpoint: None for what is no pod here.
        address: None if only an identity was given.
    """

    name: str
    endpoint: c.EndpointId | None
    address: str | None
    principal: str = ""


class UnknownParty(ValueError):
    """A text names neither a pod, an address nor a SPIFFE id."""


def party(text: str, resources: Resources, trust_domain: str) -> Party:
    """Return who is meant by ``namespace/pod``, an IP address or a SPIFFE id.

    Raises:
        UnknownParty: by neither.
    """
    if text.startswith("spiffe://"):
        return Party(text, None, None, text)
    pods = resources.pods.values()
    if "/" in text:
        found = next((pod for pod in pods if f"{pod.namespace}/{pod.name}" == text), None)
        if found is None:
            raise UnknownParty(f"there is no pod {text}")
    else:
        try:
            wanted = ip_address(text)
        except ValueError:
            raise UnknownParty(f"{text!r} is neither namespace/pod, an IP address nor a SPIFFE id") from None
        found = next((pod for pod in pods if wanted in pod.addresses), None)
        if found is None:
            return Party(text, None, str(wanted))
    return Party(
        f"{found.namespace}/{found.name}",
        None if found.host_network or not found.addresses else endpoint_id(found),
        str(found.addresses[0]) if found.addresses else None,
        f"spiffe://{trust_domain}/ns/{found.namespace}/sa/{found.account}",
    )


def evaluator_of(compiled: Compiled) -> Evaluator:
    """Return an evaluator over everything that was compiled."""
    made = Evaluator(Store())
    for update in (*changes(View(), view_of(compiled, compiled.endpoints)), c.InSync()):
        made.apply(update)
    return made


def explain(
    made: Evaluator, flow: c.Flow, endpoint: c.EndpointId, direction: c.Direction, *, enforced: bool = True
) -> tuple[Verdict, list[str]]:
    """Return the verdict about a flow to or from an endpoint, and the lines that say how it came about."""
    verdict = made.check(endpoint, flow, direction, enforced=enforced)
    identities = tuple(
        identity_of(principal, frozenset()) for principal in (flow.source_principal, flow.destination_principal)
    )
    lines = [f"{direction} of {endpoint.workload}"]
    source, destination = identities
    if source is not None and destination is not None:
        steps = walk(
            made.store, made.store.endpoints[endpoint], flow, (source, destination), direction, enforced=enforced
        ).steps
        lines += _tree(steps)
    lines.append(f"  => {'allowed by ' + str(verdict.rule) if verdict.allowed else verdict.message}")
    return verdict, lines


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
