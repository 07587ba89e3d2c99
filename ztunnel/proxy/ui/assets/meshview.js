// The mesh view: tiles, the graph, and the same as a table.

import { $, child, fill, num, rest, security, setText, tiles } from "./dom.js";
import { graphIn } from "./graph.js";
import { keep, note } from "./link.js";
import { edgesOf, nodesOf, Recent, serviceKey } from "./mesh.js";
import { showPast } from "./past.js";
import { bytes, moment, number, perSecond, span } from "./words.js";

const recent = new Recent();
let chosen = "", last = null;

function describe(node) {
  const named = node.namespace ? `${node.name} in ${node.namespace}` : node.name;
  if (node.service) return [`service ${named}`, node.full].filter((each) => each !== `service ${node.name}`).join(", ");
  return [
    named,
    node.address && node.address !== node.name ? `address ${node.address}` : "",
    node.identity ? `identity ${node.identity}` : "no identity",
    node.here ? "on this node" : "", node.state,
  ].filter(Boolean).join(", ");
}
const SECURITY = { mTLS: "mTLS", plain: "plain text", mixed: "mTLS and plain text", none: "nothing was sent" };
const graph = graphIn($("graph"), {
  describe, choose,
  explain: (edge) => [
    SECURITY[edge.security], edge.rate,
    `in the last minute ${number(edge.recent_opened)} opened${edge.trouble.length ? `, ${edge.trouble.join(" ")}` : ""}`,
    `in all ${number(edge.opened)} opened, ${number(edge.failed)} failed, of these ${number(edge.denied)} denied by policy`
      + ` and ${number(edge.refused)} refused by the peer's policy`,
  ].filter(Boolean).join("; "),
});

function choose(key) {
  chosen = chosen === key ? "" : key;
  note("mesh");
  if (last) showMesh(last);
}
$("clear").addEventListener("click", () => choose(chosen));
keep("mesh", () => ({ node: chosen }), (parameters) => { chosen = parameters.get("node") || ""; });

export function showMesh(data) {
  last = data;
  const complete = !data.flows.left_out;
  const flows = recent.of(data.flows.shown, data.time_s, complete);
  const edges = edgesOf(flows);
  const nodes = nodesOf(data.workloads.shown, flows, edges);
  const selected = nodes.some((node) => node.key === chosen) ? chosen : "";
  $("clear").hidden = !selected;
  const expiries = data.certificates.shown.map((each) => each.expires_s).filter((each) => each !== null);
  const soonest = expiries.length ? Math.min(...expiries) - data.time_s : null;
  showPast($("past"), data.past);
  tiles("tiles", [
    ["Open connections", number(data.connections.shown.length + data.connections.left_out)],
    ["In plain text", `${pairsOf(flows.filter((flow) => flow.security === "plain"))} of ${pairsOf(flows)} pairs`],
    ["Next certificate expires", soonest === null ? "–" : soonest > 0 ? `in ${span(soonest).replace(/^(\d+ \S+) .*/, "$1")}` : "expired",
      soonest !== null && soonest < 3600],
  ]);
  if (!$("mesh").hidden) graph(nodes, edges, selected);  // a hidden graph has no width
  showIdle(data, nodes);
  showFlows(data, flows, selected);
}

const pairsOf = (flows) => number(new Set(flows.map((flow) => JSON.stringify([flow.source, flow.destination]))).size);

function showIdle(data, nodes) {
  const busy = new Set(nodes.map((node) => node.key));
  const idle = data.workloads.shown.filter((each) => !busy.has(each.key));
  const line = $("idle");
  const print = JSON.stringify(idle);
  if (line.dataset.print === print) return;
  line.dataset.print = print;
  line.replaceChildren();
  if (idle.length) line.append("Without traffic: ");
  for (const each of idle) {
    child(line, "span", each.state ? "bad" : "", each.state ? `${each.name}: ${each.state}` : each.name).title = describe(each);
  }
}

// What went wrong with the connections of a flow, in all.
function failuresOf(flow) {
  const others = flow.failed - flow.denied - flow.refused;
  return [
    flow.denied ? `${number(flow.denied)} denied by policy` : "",
    flow.refused ? `${number(flow.refused)} refused by the peer's policy` : "",
    others > 0 ? `${number(others)} failed` : "",
  ].filter(Boolean).join(", ");
}

function showFlows(data, flows, selected) {
  const workloads = new Map(data.workloads.shown.map((each) => [each.key, each]));
  const name = (key) => {
    const workload = workloads.get(key);
    const sub = [workload.namespace, workload.address !== workload.name ? workload.address : ""].filter(Boolean).join(" · ");
    return { text: workload.name, sub, title: describe(workload) };
  };
  const wanted = flows.filter((flow) => !selected || [flow.source, flow.destination, serviceKey(flow)].includes(selected));
  fill("traffic", wanted.map((flow) => [
    name(flow.source), name(flow.destination), flow.service || "–", security(flow.security),
    flow.reporter === "source" ? "client" : "server",
    num(number(flow.open)), num(perSecond(flow.connections_per_s)),
    num(flow.bytes_per_s === null ? "–" : `${bytes(flow.bytes_per_s)}/s`),
    num(number(flow.opened)), num(bytes(flow.bytes_sent + flow.bytes_received)),
    { text: failuresOf(flow) || "–", className: flow.failed ? "bad" : "" },
  ]), "No traffic has been seen yet.");
  const since = data.facts.counted_since_s;
  setText($("since"), since ? `counted since ${moment(since)}, when this page was opened: Envoy's dialect has no counts by pair`
    : `since the proxy started, ${span(data.facts.uptime_s)} ago`);
  rest("traffic", data.flows, "pairs");
}
