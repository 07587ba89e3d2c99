// The form that asks /explain, and its answer as a tree.

import { $, child } from "./dom.js";

const form = $("question");
let prepared = false, istio = true;

// Set examples and lists of what can be asked about.
export function prepare(data) {
  istio = data.facts.dialect === "istio";
  if (!prepared) {
    prepared = true;
    $("way").hidden = !istio;
    $("at").hidden = istio;
    for (const [name, value] of Object.entries(data.facts.question)) form.elements[name].placeholder = value;
  }
  fillList("names", [
    ...data.workloads.shown.map((each) => each.address),
    ...data.connections.shown.map((each) => (istio ? each.source_name : "")),
  ]);
  fillList("identities", data.workloads.shown.map((each) => each.identity));
}
function fillList(id, values) {
  const wanted = [...new Set(values.filter(Boolean))].sort();
  const print = JSON.stringify(wanted);
  if ($(id).dataset.print === print) return;
  $(id).dataset.print = print;
  $(id).replaceChildren(...wanted.map((value) => {
    const option = document.createElement("option");
    option.value = value;
    return option;
  }));
}

// Ask about {source, destination, identity, direction, listener}.
function ask(question) {
  for (const name of ["source", "destination", "identity", "listener"]) form.elements[name].value = question[name] || "";
  form.elements.direction.value = question.direction || "outbound";
  location.hash = "explain";
  form.requestSubmit();
}
export function explainConnection(connection) {
  const { source, direction, identity, protocol } = connection;
  const inbound = direction === "inbound";
  if (istio) {
    const destination = inbound ? connection.next_hop : connection.destination;
    ask({ source, destination, identity: inbound ? identity : "", direction: inbound ? "inbound" : "outbound" });
    return;
  }
  const proven = direction !== "outbound" && connection.source_name && protocol.startsWith("HTTP");
  ask({ source, destination: connection.destination, identity: proven ? identity : "", listener: direction });
}
export function explainFlow(flow) {
  const identity = istio && flow.direction === "inbound" && flow.encrypted ? flow.sourceIdentity : "";
  ask({ source: flow.sourceEnd, destination: flow.destinationEnd, identity, direction: flow.direction });
}

// One answer as a tree: keys in the order of the answer, lists as items.
function tree(parent, value, name) {
  const item = child(parent, "li");
  if (name !== undefined) child(item, "span", "name", `${name.replaceAll("_", " ")}: `);
  if (value === null || typeof value !== "object") {
    item.append(value === true ? "yes" : value === false ? "no" : value === null ? "–" : String(value));
    return;
  }
  const entries = Array.isArray(value) ? value.map((each) => [undefined, each]) : Object.entries(value);
  if (!entries.length) { item.append("none"); return; }
  if (name === undefined) item.className = "item";
  const list = child(item, "ul");
  for (const [key, each] of entries) tree(list, each, key);
}
function kindOf(verdict) {
  if (verdict.startsWith("allowed, but")) return "warn";  // not by each endpoint
  return verdict.startsWith("allowed") ? "good" : "bad";
}
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const query = new URLSearchParams();
  for (const [name, value] of new FormData(form)) {
    const field = form.elements[name];
    if (value.trim() && !field.closest("label").hidden) query.set(name, value.trim());
  }
  const box = $("answer");
  let status = 0, text = "";
  try {
    const answer = await fetch(`/explain?${query}`, { headers: { accept: "application/json" } });
    status = answer.status;
    text = await answer.text();
  } catch (error) {
    text = `The proxy did not answer: ${error.message}`;
  }
  box.hidden = false;
  box.replaceChildren();
  if (status !== 200) {
    child(box, "p", "verdict bad", "No answer");
    child(box, "p", "message", text.trim());
    return;
  }
  const { verdict, ...others } = JSON.parse(text);
  child(box, "p", `verdict ${kindOf(String(verdict))}`, `Verdict: ${verdict}`);
  const list = child(box, "ul", "tree");
  for (const [name, value] of Object.entries(others)) tree(list, value, name);
});
