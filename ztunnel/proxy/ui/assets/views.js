// The views that are tables: connections, policies, certificates, configuration.

import { $, child, fill, num, rest, security, setText, tiles } from "./dom.js";
import { keep, note } from "./link.js";
import { ago, bytes, moment, number, short, span } from "./words.js";

// Connections

const FIELDS = { contains: "filter", direction: "direction", security: "security" };
let last = null, explain = null;

export function showConnections(data, explainConnection) {
  [last, explain] = [data, explainConnection];
  const directions = [...new Set(data.connections.shown.map((each) => each.direction))].sort();
  addDirections(directions);
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = data.connections.shown.filter((each) => {
    if ($("direction").value && each.direction !== $("direction").value) return false;
    if ($("security").value && each.security !== $("security").value) return false;
    const text = [each.source, each.source_name, each.destination, each.destination_name, each.next_hop, each.identity,
      each.protocol, each.direction].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  setText($("matches"), `${number(found.length)} of ${number(data.connections.shown.length)} shown`);
  fill("connections-table", found.map((each) => [
    each.direction, { text: each.source, sub: each.source_name, className: "nowrap" },
    { text: each.destination, sub: each.destination_name }, { text: each.next_hop || "–", sub: each.protocol },
    security(each.security), { text: each.identity ? short(each.identity) : "–", title: each.identity },
    num(span(each.age_s)), num(bytes(each.bytes_sent)), num(bytes(each.bytes_received)),
    { text: "Explain", label: `Explain ${each.source} to ${each.destination}`, act: () => explain(each) },
  ]), data.connections.shown.length ? "No connection matches." : "No connection is open.");
  rest("connections", data.connections, "connections");
}
function addDirections(directions) {
  const known = [...$("direction").options].map((option) => option.value);
  for (const direction of directions) if (!known.includes(direction)) child($("direction"), "option", "", direction);
}
keep("connections", () => Object.fromEntries(Object.entries(FIELDS).map(([name, id]) => [name, $(id).value])), (parameters) => {
  addDirections([parameters.get("direction") || ""]);
  for (const [name, id] of Object.entries(FIELDS)) $(id).value = parameters.get(name) || "";
  if (last) showConnections(last, explain);
});
$("filters").addEventListener("submit", (event) => event.preventDefault());
for (const id of Object.values(FIELDS)) {
  $(id).addEventListener("input", () => {
    note("connections");
    if (last) showConnections(last, explain);
  });
}

// Policies, certificates, configuration

export function showPolicies(data) {
fill("denials", data.denials.shown.map((each) => [
    { text: ago(each.last_s, data.time_s), title: moment(each.last_s), className: "nowrap" }, each.place,
    { text: each.source, sub: each.address !== each.source ? `last from ${each.address}` : "" },
    { text: each.identity ? short(each.identity) : "–", title: each.identity },
    each.destination, { text: each.reason, className: "long" }, num(number(each.count), true),
  ]), "No connection has been denied.");
  rest("denials", data.denials, "pairs");
  fill("policies-table", data.policies.shown.map((each) => [
    each.name, each.action || "–", each.scope || "–", each.mode,
    num(number(each.allowed)), num(number(each.denied), each.denied && ["enforced", "implied"].includes(each.mode)), num(number(each.ended)),
    { text: ago(each.last_s, data.time_s), title: moment(each.last_s), className: "nowrap" },
    each.faults.length ? { text: each.faults.join("; "), className: "warn" } : "–",
  ]), "There are no policies.");
  rest("policies", data.policies, "policies");
}
export function showCertificates(data) {
  fill("certificates-table", data.certificates.shown.map((each) => {
    const left = each.expires_s === null ? null : each.expires_s - data.time_s;
    const life = each.expires_s === null ? 1 : each.expires_s - each.valid_from_s;
    return [
      { text: short(each.identity), sub: each.identity === short(each.identity) ? "" : each.identity },
      { text: each.state, className: each.state === "Available" ? "" : "bad" },
      left === null ? "–" : left <= 0 ? { text: "expired", className: "nowrap bad" }
        : { text: span(left), className: left < life / 10 ? "nowrap warn" : "nowrap" },
      { text: moment(each.expires_s), className: "nowrap" }, { text: moment(each.valid_from_s), className: "nowrap" },
      { text: each.serial || "–", className: "serial" }, each.used_by || "–",
    ];
  }), "There are no certificates.");
  rest("certificates", data.certificates, "certificates");
}
export function showConfiguration(data) {
  tiles("totals", [
    ...Object.entries(data.facts.totals).map(([name, value]) => [name[0].toUpperCase() + name.slice(1), number(value)]),
    ["Running for", span(data.facts.uptime_s)],
  ]);
  fill("sources", data.sources.shown.map((each) => [
    each.name, each.address,
    each.connected === null ? "–" : each.connected ? { text: "connected", tag: "mtls" }
      : { text: each.away_s ? `away for ${span(each.away_s)}` : "not connected", className: "bad" },
    { text: each.updated_s === null ? "–" : ago(each.updated_s, data.time_s), title: moment(each.updated_s) },
    num(number(each.updates)),
  ]), "Nothing is configured.");
  fill("refusals", data.refusals.shown.map((each) => [
    each.kind, { text: each.name, className: "bad" }, each.reason,
  ]), "No resource was refused.");
  rest("refusals", data.refusals, "resources");
}
