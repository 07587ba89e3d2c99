// A flow of the flight recorder, read from a line of /flows, and the filters that `ztunnel flows` has. Pure.

function podOf(side) {
  const name = side.pod_name || side.workloads?.[0]?.name;
  return name ? `${side.namespace || ""}/${name}` : "";
}

// Return the nanoseconds of a time in RFC 3339, which have more digits than a number holds.
export function nanoseconds(time) {
  const [whole, rest = ""] = time.replace(/Z$/, "").split(".");
  return BigInt(Date.parse(`${whole}Z`)) * 1000000n + BigInt(rest.padEnd(9, "0").slice(0, 9));
}

// Return the flow of a line, or null for another line.
export function readFlow(line) {
  const flow = line.flow;
  if (!flow) return null;
  const ip = flow.IP || {}, tcp = flow.l4?.TCP || {}, more = flow.extensions?.value || {};
  const service = flow.destination_service || {};
  const end = (host, port) => (host ? `${host.includes(":") ? `[${host}]` : host}:${port}` : "");
  return {
    id: flow.uuid, time: flow.time, verdict: flow.verdict || "FORWARDED",
    direction: flow.traffic_direction === "EGRESS" ? "outbound" : "inbound",
    encrypted: Boolean(ip.encrypted),
    source: ip.source || "", sourceEnd: end(ip.source, tcp.source_port), sourcePod: podOf(flow.source || {}),
    sourceIdentity: more.source_identity || "",
    destination: ip.destination || "", destinationEnd: end(ip.destination, tcp.destination_port),
    destinationPod: podOf(flow.destination || {}), destinationIdentity: more.destination_identity || "",
    service: service.name ? `${service.namespace}/${service.name}` : "",
    durationS: more.duration_seconds, sent: more.bytes_sent, received: more.bytes_received,
    reason: more.reason || "", failure: more.failure || "", policy: more.policy || "", addon: more.addon || "",
  };
}

// Why a flow failed; empty if it did not.
export function whyOf(flow) {
  if (flow.failure === "peer_denied") return "refused by the peer's policy";
  return flow.reason;
}

// Return the bits of an address as a number and their count, or null for another text.
function bitsOf(address) {
  if (/^\d{1,3}(\.\d{1,3}){3}$/.test(address)) {
    const parts = address.split(".").map(Number);
    return parts.every((part) => part < 256) ? [parts.reduce((all, part) => (all << 8n) | BigInt(part), 0n), 32] : null;
  }
  if (!/^[\da-f:]+$/i.test(address) || !address.includes(":")) return null;
  const [head, tail, ...others] = address.split("::").map((side) => side.split(":").filter(Boolean));
  const missing = 8 - head.length - (tail?.length || 0);
  if (others.length || (tail ? missing < 1 : missing) || [...head, ...(tail || [])].some((part) => part.length > 4)) return null;
  const parts = tail ? [...head, ...Array(missing).fill("0"), ...tail] : head;
  return [parts.reduce((all, part) => (all << 16n) | BigInt(parseInt(part, 16)), 0n), 128];
}

function blockTest(text) {
  const [address, length] = text.split("/");
  const block = bitsOf(address);
  if (!block || (length !== undefined && !/^\d{1,3}$/.test(length))) return null;
  const [bits, most] = block;
  if (Number(length ?? most) > most) return null;
  const shift = BigInt(most - Number(length ?? most));
  return (host) => {
    const found = bitsOf(host);
    return Boolean(found) && found[1] === most && found[0] >> shift === bits >> shift;
  };
}

// Return a test of one side: a SPIFFE id with * for anything, an address or block, or NAMESPACE/PREFIX of a pod. A
// prefix without a namespace is in namespace default; "/PREFIX" is in any.
export function sideTest(text) {
  if (text.startsWith("spiffe://")) {
    const pattern = new RegExp(`^${text.split("*").map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&")).join(".*")}$`, "s");
    return (pod, host, identity) => pattern.test(identity);
  }
  const inBlock = blockTest(text);
  if (inBlock) return (pod, host) => inBlock(host);
  if (text.startsWith("/")) return (pod) => pod !== "" && pod.slice(pod.indexOf("/") + 1).startsWith(text.slice(1));
  const prefix = text.includes("/") ? text : `default/${text}`;
  return (pod) => pod.startsWith(prefix);
}

// Return whether a flow is wanted. Filters: pod, verdict, security (encrypted or plain); empty ones choose all.
export function chosenBy({ pod = "", verdict = "", security = "" }) {
  const either = pod.trim() ? sideTest(pod.trim()) : null;
  return (flow) => (!verdict || flow.verdict === verdict.toUpperCase())
    && (!security || flow.encrypted === (security === "encrypted"))
    && (!either || either(flow.sourcePod, flow.source, flow.sourceIdentity)
      || either(flow.destinationPod, flow.destination, flow.destinationIdentity));
}
