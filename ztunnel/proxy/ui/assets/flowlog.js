// The flows view: follows the flight recorder while it is looked at, the newest connection first.

import { $, fill, num, security, setText } from "./dom.js";
import { chosenBy, nanoseconds, readFlow, whyOf } from "./flow.js";
import { keep, note } from "./link.js";
import { bytes, number, short } from "./words.js";

const KEPT = 1000;    // flows that filters choose from
const ROWS = 100;     // that are shown
const MOST = 500;     // per question: a flow costs the proxy 0.1 ms
const AGAIN_MS = 2000;
const VERDICTS = { FORWARDED: "mtls", DROPPED: "bad", ERROR: "bad" };
const FIELDS = { pod: "flow-pod", verdict: "flow-verdict", security: "flow-security" };

const state = () => Object.fromEntries(Object.entries(FIELDS).map(([name, id]) => [name, $(id).value]));

// Return {follow(wanted), facts(facts)}; explain(flow) is called for a flow whose button is pressed.
export function flowView(explain) {
  let flows = [], newest = 0n, lost = false, failed = "", timer = null, wanted = false, round = 0, asking = false, recorder = null, dialect = "";

  function row(flow) {
    const mayExplain = dialect === "istio" || flow.direction === "outbound";
    return [
      { text: `${flow.time.slice(11, 23)}`, title: flow.time, className: "nowrap" },
      { text: flow.verdict.toLowerCase(), tag: VERDICTS[flow.verdict] || "plain" }, flow.direction,
      { text: flow.sourcePod || flow.sourceEnd || "not known", sub: flow.sourcePod && flow.sourceEnd, title: flow.sourceIdentity || "no identity" },
      { text: flow.destinationPod || flow.destinationEnd || "not known", title: flow.destinationIdentity || "no identity",
        sub: [flow.destinationPod && flow.destinationEnd, flow.service && `service ${flow.service}`].filter(Boolean).join(", ") },
      security(flow.encrypted ? "mTLS" : "plain"),
      num(flow.durationS === undefined ? "–" : `${flow.durationS.toFixed(3)} s`), num(bytes(flow.sent)), num(bytes(flow.received)),
      { text: whyOf(flow) || "–", className: flow.failure ? "long bad" : "",
        sub: [whyOf(flow) !== flow.reason && flow.reason, flow.policy && `policy ${flow.policy}`, flow.addon && `addon ${flow.addon}`].filter(Boolean).join(", ") },
      mayExplain ? { text: "Explain", label: `Explain ${flow.sourceEnd} to ${flow.destinationEnd}`, act: () => explain(flow) } : "",
    ];
  }

  function show() {
    if ($("flows").hidden) return;
    const found = flows.filter(chosenBy(state()));
    setText($("flow-matches"), `${number(found.length)} of the last ${number(flows.length)}`);
    fill("flows-table", found.slice(0, ROWS).map(row),
      recorder === 0 ? "The flight recorder is off (ZTUNNEL_FLOWS=0)." : failed || (flows.length ? "No flow matches." : "No connection has ended yet."));
    const notes = [];
    if (failed && flows.length) notes.push(failed);
    if (found.length > ROWS) notes.push(`${number(found.length - ROWS)} older ones are not shown.`);
    if (lost) notes.push("Connections end faster than this page reads: some are missing. ztunnel flows -f has all.");
    setText($("rest-flowlog"), notes.join(" "));
  }

  async function ask() {
    if (asking) return;
    asking = true;
    try {
      const query = newest ? `after=${newest}&last=${MOST}` : `last=${KEPT}`;
      const answer = await fetch(`/flows?${query}`);
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const lines = (await answer.text()).split("\n").filter(Boolean).map((line) => JSON.parse(line));
      const fresh = lines.map(readFlow).filter(Boolean).filter((flow) => nanoseconds(flow.time) > newest);
      if (newest && (fresh.length >= MOST || lines.some((line) => line.lost_events))) lost = true;
      for (const flow of fresh) {
        const time = nanoseconds(flow.time);
        if (time > newest) newest = time;
      }
      flows = [...fresh.reverse(), ...flows].slice(0, KEPT);
      failed = "";
    } catch (error) {
      failed = `The proxy did not answer: ${error.message}`;
    }
    asking = false;
    show();
  }

  keep("flows", state, (parameters) => {
    for (const [name, id] of Object.entries(FIELDS)) $(id).value = parameters.get(name) || "";
  });
  $("flow-filters").addEventListener("submit", (event) => event.preventDefault());
  for (const id of Object.values(FIELDS)) {
    $(id).addEventListener("input", () => { note("flows"); show(); });
  }
  return {
    // Follow, or stop.
    follow(on) {
      show();
      if (on === wanted) return;
      wanted = on;
      clearTimeout(timer);
      const own = ++round;  // an earlier round, whose answer is still awaited, must not go on beside this one
      const again = async () => {
        await ask();
        if (wanted && own === round) timer = setTimeout(again, AGAIN_MS);
      };
      if (on) again();
    },
    facts(facts) {
      if (recorder === facts.flows_kept && dialect === facts.dialect) return;
      recorder = facts.flows_kept;
      dialect = facts.dialect;
      show();
    },
  };
}
