"""What the folders below ``deploy/kustomize`` have in common, for their tests."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from ztunnel.kube.kinds import Selection

#: API group, resource and verb.
Right = tuple[str, str, str]


class Kustomization:
    """One folder of manifests."""

    def __init__(self, name: str) -> None:
        self._folder = Path(__file__).parents[2] / "deploy" / "kustomize" / name

    def documents(self, name: str) -> dict[str, Any]:
        """Return the documents of a file by kind."""
        texts = yaml.safe_load_all((self._folder / name).read_text())
        return {document["kind"]: document for document in texts}

    def pod(self) -> dict[str, Any]:
        """Return the pod of the DaemonSet."""
        found: dict[str, Any] = self.documents("daemonset.yaml")["DaemonSet"]["spec"]["template"]["spec"]
        return found

    def lists_every_file(self) -> bool:
        """Return whether the kustomization has every file of the folder, and no other."""
        listed = yaml.safe_load((self._folder / "kustomization.yaml").read_text())["resources"]
        return set(listed) == {path.name for path in self._folder.iterdir()} - {"kustomization.yaml"}

    def given(self) -> set[Right]:
        """Return the rights that the role grants."""
        return {
            (group, resource, verb)
            for rule in self.documents("rbac.yaml")["ClusterRole"]["rules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }

    def binds_its_account(self) -> bool:
        """Return whether the pod runs under the account that the role is bound to."""
        objects = self.documents("rbac.yaml")
        [subject] = objects["ClusterRoleBinding"]["subjects"]
        account = objects["ServiceAccount"]["metadata"]
        return (
            (subject["name"], subject["namespace"]) == (account["name"], account["namespace"])
            and self.pod()["serviceAccountName"] == account["name"]
            and objects["ClusterRoleBinding"]["roleRef"]["name"] == objects["ClusterRole"]["metadata"]["name"]
        )


def asked(selections: Iterable[Selection]) -> set[Right]:
    """Return the rights that following these kinds needs."""
    return {
        (selection.kind.api_version.rpartition("/")[0], selection.kind.plural, verb)
        for selection in selections
        for verb in ("list", "watch")
    }
