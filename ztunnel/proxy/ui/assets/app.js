// The frame: follows /ui/events while the page is visible, gives each event to the views, and turns from view to view.

import { $, setText } from "./dom.js";
import { explainConnection, explainFlow, prepare } from "./explain.js";
import { flowView } from "./flowlog.js";
import * as link from "./link.js";
import { showMesh } from "./meshview.js";
import { showCertificates, showConfiguration, showConnections, showPolicies } from "./views.js";
import { moment, number, span } from "./words.js";

const VIEWS = ["mesh", "flows", "connections", "policies", "certificates", "configuration", "explain"];
// What a dialect does not have, by view.
const MISSING = {
  istio: {},
  envoy: {
    mesh: "Envoy's dialect: a workload is an address; it has a name and a namespace once it has proven an identity. A service has a name "
      + "where its cluster's metadata gives one.",
    flows: "Envoy's dialect: pods are not known here. A side has the workload's name that it gives itself, else that of the account whose "
      + "identity it has proven.",
    policies: "Envoy's dialect: policies have no scope of their own, and a policy that cannot be read refuses its listener as a whole.",
    configuration: "Envoy's dialect: updates are not counted.",
  },
};
const flows = flowView(explainFlow);
let last = null, paused = false, stream = null, receivedAt = 0, view = "mesh", lostAt = 0;

// Events

function count(id, value, bad) {
  setText($(`count-${id}`), value ? number(value) : "");
  $(`count-${id}`).classList.toggle("bad", Boolean(bad && value));
}
function badge(id, text, kind) {
  setText($(id), text);
  $(id).className = `pill ${kind}`;
}
// Whether the control plane is there, and since when it is not.
function showPlane(data) {
  const planes = data.sources.shown.filter((each) => each.connected !== null);
  const gone = planes.filter((each) => !each.connected).sort((a, b) => b.away_s - a.away_s)[0];
  if (!planes.length) badge("plane", "no control plane", "");
  else if (!gone) badge("plane", "control plane connected", "good");
  else badge("plane", `control plane gone since ${moment(data.time_s - gone.away_s).slice(11)} (${span(gone.away_s)})`, "bad");
}
function show(data) {
  last = data;
  const facts = data.facts;
  setText($("node"), facts.node);
  document.title = facts.node ? `${facts.node} – ztunnel` : "ztunnel";
  setText($("dialect"), facts.dialect === "istio" ? "Istio" : "Envoy's dialect");
  setText($("version"), facts.version);
  for (const each of ["mesh", "flows", "policies", "configuration"]) setText($(`missing-${each}`), MISSING[facts.dialect]?.[each] || "");
  count("connections", data.connections.shown.length + data.connections.left_out);
  const implied = data.policies.shown.filter((each) => each.mode === "implied").length; // no policy of its own
  count("policies", data.policies.shown.length - implied + data.policies.left_out);
  const late = data.certificates.shown.filter((each) => each.state !== "Available" || each.expires_s < data.time_s);
  count("certificates", late.length || data.certificates.shown.length + data.certificates.left_out, late.length);
  count("refusals", data.refusals.shown.length + data.refusals.left_out, true);
  badge("state", facts.state, facts.ready ? "good" : "bad");
  showPlane(data);
  showMesh(data);
  flows.facts(facts);
  showConnections(data, explainConnection);
  showPolicies(data);
  showCertificates(data);
  showConfiguration(data);
  prepare(data);
}

function follow() {
  flows.follow(view === "flows" && !paused && !document.hidden);
  if (stream || paused || document.hidden) return;
  stream = new EventSource("/ui/events");
  stream.addEventListener("message", (event) => {
    receivedAt = Date.now();
    lostAt = 0;
    show(JSON.parse(event.data));
  });
  stream.addEventListener("error", () => {
    lostAt = lostAt || Date.now();
    badge("state", `no answer from the proxy since ${moment(lostAt / 1000).slice(11)}`, "bad");
    if (stream && stream.readyState === EventSource.CLOSED) {
      // The browser gives up after an answer other than 200, such as that too many pages are open.
      stream = null;
      setTimeout(follow, 5000);
    }
  });
}
function leave() {
  flows.follow(false);
  if (stream) stream.close();
  stream = null;
}
setInterval(() => {
  const seconds = Math.round((Date.now() - receivedAt) / 1000);
  setText($("age"), paused ? "paused" : !receivedAt ? "" : seconds < 5 ? "live" : `${span(seconds)} old`);
}, 1000);
document.addEventListener("visibilitychange", () => (document.hidden ? leave() : follow()));
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  setText($("pause"), paused ? "Resume" : "Pause");
  if (paused) leave(); else follow();
});

// Colours

const THEMES = ["auto", "light", "dark"];
const dark = matchMedia("(prefers-color-scheme: dark)");
let theme = "auto";
try { theme = localStorage.getItem("theme") || "auto"; } catch { /* storage is off */ }
function paint() {
  if (!THEMES.includes(theme)) theme = "auto";
  document.documentElement.dataset.theme = theme === "auto" ? (dark.matches ? "dark" : "light") : theme;
  setText($("theme"), `Theme: ${theme}`);
}
$("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  try { localStorage.setItem("theme", theme); } catch { /* for this page only */ }
  paint();
});
dark.addEventListener("change", paint);
paint();

// Views

function turn() {
  view = link.open(location.hash, VIEWS);
  for (const id of VIEWS) $(id).hidden = id !== view;
  for (const each of document.querySelectorAll("nav a")) {
    if (each.hash === `#${view}`) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  scrollTo(0, 0);
  if (last) showMesh(last);
  follow();
}
addEventListener("hashchange", turn);
addEventListener("resize", () => last && showMesh(last));
turn();
