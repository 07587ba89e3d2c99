// Turns the flows of events into the nodes and edges of the graph. Pure.
//
// A service is a node between the client and the workloads behind it. Both ends of a connection may be on this
// node, and then both report it: of a pair the reporter with more connections counts, and failures of either.

import { bytes, number, perSecond } from "./words.js";

const WINDOW_S = 60;
// Shares from which an edge counts as failing; below, some connections fail.
const FAILING = 0.05;
const COUNTED = ["opened", "failed", "denied", "refused"];
const SUMMED = ["open", ...COUNTED, "connections_per_s", "bytes_per_s"];
const RECENT = COUNTED.map((name) => `recent_${name}`);
// What either end may know alone.
const TROUBLES = ["failed", "denied", "refused", "recent_failed", "recent_denied", "recent_refused"];

const idOf = (flow) => JSON.stringify([flow.source, flow.destination, flow.service, flow.reporter, flow.security]);
export const serviceKey = (flow) => (flow.service ? JSON.stringify(["service", flow.service]) : "");

// What flows have counted in the last minute, by the events of that minute; nothing at the first event.
export class Recent {
  #events = [];

  // Return flows with recent_opened and its like. If an event has all flows, one that is new in the next began at 0.
  of(flows, timeS, complete) {
    const counts = new Map(flows.map((flow) => [idOf(flow), COUNTED.map((name) => flow[name])]));
    this.#events = this.#events.filter((each) => each.timeS < timeS && timeS - each.timeS <= WINDOW_S);
    const fresh = this.#events.at(-1)?.complete && complete;
    const found = flows.map((flow) => {
      const now = counts.get(idOf(flow));
      const before = this.#events.find((each) => each.counts.has(idOf(flow)))?.counts.get(idOf(flow));
      const base = before || (fresh ? now.map(() => 0) : now);
      return { ...flow, ...Object.fromEntries(RECENT.map((name, index) => [name, Math.max(0, now[index] - base[index])])) };
    });
    this.#events.push({ timeS, counts, complete });
    return found;
  }
}

const add = (sums, flow) => {
  for (const name of [...SUMMED, ...RECENT]) sums[name] = (sums[name] || 0) + (flow[name] || 0);
  sums.security.add(flow.security);
};

// Return groups of the flows between two workloads, by service: {source, destination, service, ...sums}.
function groups(flows) {
  const pairs = new Map();
  for (const flow of flows) {
    const key = JSON.stringify([flow.source, flow.destination]);
    if (!pairs.has(key)) pairs.set(key, { source: new Map(), destination: new Map() });
    const byService = pairs.get(key)[flow.reporter];
    const service = serviceKey(flow);
    if (!byService.has(service)) {
      byService.set(service, { source: flow.source, destination: flow.destination, service, security: new Set() });
    }
    add(byService.get(service), flow);
  }
  return [...pairs.values()].flatMap((sides) => {
    const [one, other] = [[...sides.source.values()], [...sides.destination.values()]];
    const total = (side, name) => side.reduce((sum, each) => sum + each[name], 0);
    const [counted, beside] = total(one, "opened") >= total(other, "opened") && one.length ? [one, other] : [other, one];
    counted.sort((a, b) => b.opened - a.opened);
    for (const name of TROUBLES) {
      counted[0][name] += Math.max(0, total(beside, name) - total(counted, name));
    }
    return counted;
  });
}

// How connections of the last minute went: kind and what is said of it.
export function health(edge) {
  const tried = Math.max(edge.recent_opened, edge.recent_failed);
  if (!tried) return { kind: edge.open ? "good" : "quiet", words: [] };
  const refusals = Math.min(edge.recent_failed, Math.max(edge.recent_denied, edge.recent_refused));
  const failures = edge.recent_failed - refusals;
  const share = (count) => `${Math.max(1, Math.round(100 * count / tried))} %`;
  const words = [];
  if (refusals) {
    // Only the peer knows which of its policies it was.
    words.push(...(edge.recent_denied ? [`${share(refusals)} denied`, "by policy"] : [`${share(refusals)} refused by`, "the peer's policy"]));
  }
  if (failures) words.push(`${share(failures)} failed`);
  const kind = refusals > failures ? "refused" : failures / tried >= FAILING ? "failing" : failures ? "some" : "good";
  return { kind, words };
}

function securityOf(edge) {
  edge.security.delete("none");  // ended before anything was sent
  return edge.security.size > 1 ? "mixed" : [...edge.security][0] || "none";
}

function described(edge) {
  const { kind, words } = health(edge);
  const rates = edge.connections_per_s ? [perSecond(edge.connections_per_s)] : [];
  if (edge.bytes_per_s >= 1) rates.push(`${bytes(edge.bytes_per_s)}/s`);
  const rate = rates.join(", ") || (edge.open ? `${number(edge.open)} open` : "");
  return { ...edge, security: securityOf(edge), kind, trouble: words, rate };
}

// Return edges with one per pair of nodes; nodes are workloads' and services' keys.
export function edgesOf(flows) {
  const edges = new Map();
  for (const group of groups(flows)) {
    const hops = group.service ? [[group.source, group.service], [group.service, group.destination]]
      : [[group.source, group.destination]];
    for (const [source, target] of hops) {
      const key = JSON.stringify([source, target]);
      if (!edges.has(key)) edges.set(key, { key, source, target, security: new Set() });
      const sums = edges.get(key);
      for (const name of [...SUMMED, ...RECENT]) sums[name] = (sums[name] || 0) + group[name];
      for (const each of group.security) sums.security.add(each);
    }
  }
  return [...edges.values()].map(described);
}

// Return the nodes that edges have: workloads as given, and services.
export function nodesOf(workloads, flows, edges) {
  const used = new Set(edges.flatMap((edge) => [edge.source, edge.target]));
  const services = new Map(flows.filter((flow) => flow.service).map((flow) => [serviceKey(flow), {
    key: serviceKey(flow), service: true, namespace: flow.service_namespace,
    name: flow.service_namespace ? flow.service.split(".")[0] : flow.service, full: flow.service,
  }]));
  return [...workloads, ...services.values()].filter((node) => used.has(node.key));
}
