"""The manifests of the PolicySync server: the role permits exactly the command's requests, and the process has no
other privilege.
"""

from argparse import ArgumentParser

from tests.deploy.kustomization import Kustomization, asked
from ztunnel.policy.policysync import add_arguments
from ztunnel.policy.policysync.kinds import SERVED

MANIFESTS = Kustomization("policy")


def test_every_file_is_in_the_kustomization() -> None:
    assert MANIFESTS.lists_every_file()


def test_the_role_is_what_the_command_asks_for() -> None:
    # Calico's API server asks whether an account may read the tier of a policy.
    tiered = {
        ("projectcalico.org", f"tier.{selection.kind.plural}", verb)
        for selection in SERVED
        if selection.kind.api_version == "projectcalico.org/v3"
        and selection.kind.name
        in ("NetworkPolicy", "GlobalNetworkPolicy", "StagedNetworkPolicy", "StagedGlobalNetworkPolicy")
        for verb in ("get", "list", "watch")
    }
    events = {("", "events", "create"), ("", "events", "patch")}
    assert MANIFESTS.given() == asked(SERVED) | tiered | events | {("projectcalico.org", "tiers", "get")}


def test_the_account_is_the_bound_one() -> None:
    assert MANIFESTS.binds_its_account()


def test_the_container_has_its_folder_and_no_privilege() -> None:
    pod = MANIFESTS.pod()
    [container] = pod["containers"]
    security = container["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert (security["privileged"], security["allowPrivilegeEscalation"]) == (False, False)
    assert "hostNetwork" not in pod
    parser = ArgumentParser()
    add_arguments(parser.add_subparsers())
    args = parser.parse_args(container["args"])
    assert (args.kube, args.files, args.node) == (True, [], "$(NODE_NAME)")
    [mount], [volume] = container["volumeMounts"], pod["volumes"]
    assert str(args.prefix) == mount["mountPath"] == volume["hostPath"]["path"]
    assert mount["name"] == volume["name"]
    [port] = container["ports"]
    assert str(port["containerPort"]) == args.metrics
    assert container["readinessProbe"]["httpGet"] == {"port": port["containerPort"], "path": "/readyz"}
    assert container["livenessProbe"]["httpGet"] == {"port": port["containerPort"], "path": "/healthz"}
