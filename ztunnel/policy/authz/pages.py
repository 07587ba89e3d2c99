"""The policy server's admin pages: the active policies with their counts, and explanations why it would deny a
request.
"""

import json

from ztunnel.policy.authz.server import PolicyServer
from ztunnel.policy.calico.explain import BadQuestion, answer
from ztunnel.policy.calico.follower import Follower
from ztunnel.policy.calico.report import in_force, state_of
from ztunnel.runtime.http.page import JSON, PLAIN, Page, PageRequest, not_found, printable, text


def page(server: PolicyServer, follower: Follower, request: PageRequest) -> Page:
    """Answer one request to the admin server."""
    evaluator = follower.evaluator
    if request.path == "/policies":
        state = state_of(follower.name, follower.error, follower.age_s, in_sync=follower.in_sync)
        body = in_force(evaluator.store, state, server.uses)
        return Page(content_type=JSON, body=body)
    if request.path == "/policies/explain":
        try:
            allowed, lines = answer(evaluator, dict(request.query.pairs))
        except BadQuestion as error:
            return text(f"{printable(str(error))}\n", 400, PLAIN)
        return text(json.dumps({"allowed": allowed, "lines": lines}) + "\n", content_type=JSON)
    return not_found(["/policies", "/policies/explain"])
