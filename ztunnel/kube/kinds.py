"""Kinds of objects, their places in the API, and a reader's selection. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ztunnel.kube.objects import Object


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of the API.

    Attributes:
        name: the kind's name, such as ``Pod``.
        api_version: group and version, such as ``apps/v1``; the core group has none.
        plural: the name in paths, such as ``pods``.
        namespaced: whether its objects are in namespaces.
        group: the API group in keys of objects, if another group has a kind of this name; see :attr:`called`.
    """

    name: str
    api_version: str
    plural: str
    namespaced: bool = True
    group: str = ""

    @property
    def called(self) -> str:
        """The kind's name in an :class:`~ztunnel.kube.objects.ObjectKey`, such as
        ``NetworkPolicy.projectcalico.org``.
        """
        return f"{self.name}.{self.group}" if self.group else self.name

    def path(self, namespace: str = "", name: str = "") -> str:
        """Return the path of one object, of all objects in a namespace, or of all objects."""
        parts = ["/apis" if "/" in self.api_version else "/api", self.api_version]
        if namespace and self.namespaced:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name:
            parts.append(name)
        return "/".join(parts)


POD: Final = Kind("Pod", "v1", "pods")
NAMESPACE: Final = Kind("Namespace", "v1", "namespaces", namespaced=False)
NODE: Final = Kind("Node", "v1", "nodes", namespaced=False)
SERVICE: Final = Kind("Service", "v1", "services")
SERVICE_ACCOUNT: Final = Kind("ServiceAccount", "v1", "serviceaccounts")
SECRET: Final = Kind("Secret", "v1", "secrets")
EVENT: Final = Kind("Event", "v1", "events")
NETWORK_POLICY: Final = Kind("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies")
CLUSTER_NETWORK_POLICY: Final = Kind(
    "ClusterNetworkPolicy", "policy.networking.k8s.io/v1alpha2", "clusternetworkpolicies", namespaced=False
)
ADMIN_NETWORK_POLICY: Final = Kind(
    "AdminNetworkPolicy", "policy.networking.k8s.io/v1alpha1", "adminnetworkpolicies", namespaced=False
)
BASELINE_ADMIN_NETWORK_POLICY: Final = Kind(
    "BaselineAdminNetworkPolicy",
    "policy.networking.k8s.io/v1alpha1",
    "baselineadminnetworkpolicies",
    namespaced=False,
)
MUTATING_WEBHOOK: Final = Kind(
    "MutatingWebhookConfiguration",
    "admissionregistration.k8s.io/v1",
    "mutatingwebhookconfigurations",
    namespaced=False,
)
TOKEN_REVIEW: Final = Kind("TokenReview", "authentication.k8s.io/v1", "tokenreviews", namespaced=False)
DAEMON_SET: Final = Kind("DaemonSet", "apps/v1", "daemonsets")


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection of one kind's objects.

    Attributes:
        namespace: only objects of this namespace. Empty for all.
        labels: a label selector in the API's notation, such as ``app=web,tier!=test``.
        fields: a field selector, such as ``spec.nodeName=worker``.
        keep: reduces an object to the reader's needs, to save heap. Called once for each change. If it raises for
            a malformed object, the error is logged and the whole object is passed to the reader.
        optional: whether the API server can lack the kind (a custom resource that is not installed). Then there
            are no objects.
        dispensable: if the role has no access to the kind, readers do not wait for this kind. It is reported as a
            fault, and there are no objects in the meantime.
    """

    kind: Kind
    namespace: str = ""
    labels: str = ""
    fields: str = ""
    keep: Callable[[Object], Object] | None = None
    optional: bool = False
    dispensable: bool = False

    def params(self) -> dict[str, str]:
        """Return the query parameters of a list or watch."""
        selectors = {"labelSelector": self.labels, "fieldSelector": self.fields}
        return {name: value for name, value in selectors.items() if value}
