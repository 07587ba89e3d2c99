"""A small cluster as YAML, and what is made of it."""

from collections.abc import Iterator

from xds.model import calico as c
from ztunnel.policy.calico.compile import Compiled, compile_resources
from ztunnel.policy.calico.evaluator import Evaluator
from ztunnel.policy.calico.read import read_resources
from ztunnel.policy.calico.store import Store

PODS = """
{apiVersion: v1, kind: Namespace, metadata: {name: shop, labels: {env: prod}}}
---
{apiVersion: v1, kind: Namespace, metadata: {name: test, labels: {env: test}}}
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: frontend, namespace: shop, labels: {role: web}}}
---
{apiVersion: v1, kind: Pod, metadata: {name: front, namespace: shop, uid: u-1, labels: {app: frontend}},
 spec: {serviceAccountName: frontend, nodeName: n1}, status: {podIPs: [{ip: 10.0.0.1}, {ip: "fd00::1"}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: back, namespace: shop, uid: u-2, labels: {app: backend}},
 spec: {nodeName: n1, containers: [{ports: [{name: http, containerPort: 8080}]}]}, status: {podIP: 10.0.0.2}}
---
{apiVersion: v1, kind: Pod, metadata: {name: other, namespace: test, labels: {app: frontend}},
 spec: {serviceAccountName: frontend, nodeName: n2}, status: {podIP: 10.0.0.3}}
---
{apiVersion: v1, kind: Pod, metadata: {name: host, namespace: shop, labels: {app: frontend}},
 spec: {hostNetwork: true}, status: {podIP: 192.168.0.1}}
---
{apiVersion: v1, kind: Service, metadata: {name: web, namespace: shop},
 spec: {selector: {app: backend},
        ports: [{port: 80, targetPort: http}, {port: 53, targetPort: 5353, protocol: UDP}]}}
---
"""
SEED = """
apiVersion: projectcalico.org/v3
kind: GlobalNetworkPolicy
metadata: {name: allow-frontend-to-backend}
spec:
  selector: app == 'backend'
  ingress:
  - action: Allow
    source: {serviceAccounts: {names: [frontend], selector: role == 'web'}}
    http: {methods: [GET, POST], paths: [{exact: /api/v1/data}, {prefix: /api/v2/}]}
  egress: [{action: Allow}]
"""
FRONT = c.EndpointId("k8s", "shop/front", "eth0")
BACK = c.EndpointId("k8s", "shop/back", "eth0")
OTHER = c.EndpointId("k8s", "test/other", "eth0")


def global_policy(name: str, spec: str) -> str:
    metadata = f"{{name: {name}}}"
    kind = "apiVersion: projectcalico.org/v3, kind: GlobalNetworkPolicy"
    return f"{{{kind}, metadata: {metadata}, spec: {spec}}}\n---\n"


def local_policy(name: str, spec: str) -> str:
    metadata = f"{{name: {name}, namespace: shop}}"
    return f"{{apiVersion: projectcalico.org/v3, kind: NetworkPolicy, metadata: {metadata}, spec: {spec}}}\n---\n"


def compiled(text: str, pods: str = PODS) -> Compiled:
    return compile_resources(read_resources({"a.yaml": pods + text}))


def updates(found: Compiled) -> Iterator[c.Update]:
    """Yield everything, as a stream without a filter would."""
    for set_id, (kind, members) in found.ip_sets.items():
        yield c.IpSetUpdate(set_id, kind, tuple(members))
    for policy_id, policy in found.policies.items():
        yield c.PolicyUpdate(policy_id, policy)
    for name, profile in found.profiles.items():
        yield c.ProfileUpdate(name, profile)
    for endpoint_id, endpoint in found.endpoints.items():
        yield c.EndpointUpdate(endpoint_id, endpoint)
    for (namespace, name), labels in found.accounts.items():
        yield c.ServiceAccountUpdate(namespace, name, labels)
    for name, labels in found.namespaces.items():
        yield c.NamespaceUpdate(name, labels)
    yield c.InSync()


def evaluator(found: Compiled) -> Evaluator:
    made = Evaluator(Store())
    for update in updates(found):
        made.apply(update)
    return made


def flow(
    method: str | None = "GET",
    path: str | None = "/api/v1/data",
    *,
    principal: str = "spiffe://cluster.local/ns/shop/sa/frontend",
    source: str = "10.0.0.1",
    port: int = 8080,
) -> c.Flow:
    """Return a flow to the pod ``back``, from ``front`` unless said otherwise."""
    return c.Flow(
        source_ip=source,
        destination_ip="10.0.0.2",
        destination_port=port,
        source_principal=principal,
        method=method,
        path=path,
    )
