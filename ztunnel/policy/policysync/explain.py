"""Explains decisions from files: provides the endpoints of a question, and an evaluator over all objects. Pure."""

from ipaddress import ip_address

from xds.model import calico as c
from ztunnel.policy.calico.compile import Compiled, endpoint_id, with_own_addresses
from ztunnel.policy.calico.evaluator import Evaluator
from ztunnel.policy.calico.explain import Party, UnknownParty
from ztunnel.policy.calico.resources import Resources
from ztunnel.policy.calico.store import Store
from ztunnel.policy.policysync.view import View, changes, view_of


def party(text: str, resources: Resources, trust_domain: str) -> Party:
    """Look up the party named by a ``namespace/pod``, an IP address or a SPIFFE id.

    Raises:
        UnknownParty: the text is none of these.
    """
    if text.startswith("spiffe://"):
        return Party(text, None, None, text)
    known = with_own_addresses(resources.pods)
    pods = known.values()
    if "/" in text:
        found = next((pod for pod in pods if f"{pod.namespace}/{pod.name}" == text), None)
        if found is None:
            raise UnknownParty(f"there is no pod {text}")
        lost = resources.pods[found.namespace, found.name].addresses
        if lost and not found.addresses:
            holder = next(pod for pod in pods if pod.is_endpoint and lost[0] in pod.addresses)
            raise UnknownParty(f"{text} has lost its address {lost[0]} to {holder.namespace}/{holder.name}")
    else:
        try:
            wanted = ip_address(text)
        except ValueError:
            raise UnknownParty(f"{text!r} is neither namespace/pod, an IP address nor a SPIFFE id") from None
        # A pod of its own address comes before pods in the node's network, which share the node's address.
        having = (pod for pod in pods if wanted in pod.addresses)
        found = min(having, key=lambda pod: pod.host_network, default=None)
        if found is None:
            return Party(text, None, str(wanted))
    return Party(
        f"{found.namespace}/{found.name}",
        None if found.host_network or not found.addresses else endpoint_id(found),
        str(found.addresses[0]) if found.addresses else None,
        f"spiffe://{trust_domain}/ns/{found.namespace}/sa/{found.account}",
    )


def evaluator_of(compiled: Compiled) -> Evaluator:
    """Return an evaluator that has all compiled objects."""
    made = Evaluator(Store())
    for update in (*changes(View(), view_of(compiled, compiled.endpoints)), c.InSync()):
        made.apply(update)
    return made
