// The last 15 minutes as small curves in tiles: what the proxy's ring of samples has.

import { child, setText } from "./dom.js";
import { bytes, perSecond, span } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDE = 90, HIGH = 28;  // of a curve's own coordinates: a unit per step
const CURVES = [
  ["connections", "New connections", perSecond, "A connection between two pods of this node counts at both ends."],
  ["failures", "Failures", perSecond, "Connections that failed or were refused, also before they opened."],
  ["denials", "Refusals", perSecond, "Failures by a policy, an addon or a revoked certificate, here or at the peer."],
  ["moved", "Bytes", (value) => `${bytes(value)}/s`, "Both directions; a connection between two pods of this node counts at both ends."],
];

// Return the outline of a curve: the newest step is at the right edge.
export function outline(values) {
  const most = Math.max(...values, 1e-9);
  const points = values.map((value, index) => [WIDE - values.length + index + 0.5, HIGH - 1 - (HIGH - 3) * value / most]);
  return points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

function tile(list) {
  const made = child(list, "div", "curve");
  child(made, "dt");
  child(made, "dd");
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDE} ${HIGH}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  for (const name of ["area", "line"]) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", name);
    svg.append(path);
  }
  made.append(svg);
  child(made, "dd", "most");
  return made;
}

export function showPast(list, past) {
  CURVES.forEach(([name, title, words, explained], index) => {
    const made = list.children[index] || tile(list);
    const [term, now, svg, most] = made.children;
    const values = (past[name] || []).map((grown) => grown / past.step_s);
    const bad = (name === "failures" || name === "denials") && values.at(-1) > 0;
    made.title = explained;
    made.classList.toggle("bad", bad);
    setText(term, title);
    setText(now, values.length ? words(values.at(-1)) : "–");
    const [area, line] = svg.children;
    const drawn = values.length > 1 ? outline(values) : "";
    line.setAttribute("d", drawn);
    area.setAttribute("d", drawn && `${drawn}V${HIGH}H${WIDE - values.length + 0.5}Z`);
    setText(most, values.length ? `at most ${words(Math.max(...values))} in ${span(values.length * past.step_s)}`
      : `the first step of ${past.step_s ? span(past.step_s) : "time"} has not ended`);
  });
}
