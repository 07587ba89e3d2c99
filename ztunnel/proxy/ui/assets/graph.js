// Draws workloads, services and their traffic as SVG. Elements are kept from event to event, so that focus and hover
// stay. All text goes through textContent: names come from the mesh and are not trusted.

import { place } from "./labels.js";
import { HEIGHT, layout } from "./layout.js";
import { short } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const LINE = 15;      // of a label
const CROWDED = 24;   // edges from which only those with trouble are labelled, or those of the chosen node

function make(tag, attributes, parent) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (parent) parent.append(element);
  return element;
}
function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
}

const pen = document.createElement("canvas").getContext("2d");
function widthOf(text, font) {
  pen.font = `${font} ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}
// Cut from the middle: both ends of a name tell pods apart.
function fit(text, most, font) {
  if (widthOf(text, font) <= most) return text;
  let letters = text.length - 1;
  const cut = () => {
    const head = Math.ceil(letters * 0.6);
    return `${text.slice(0, head)}…${text.slice(text.length - (letters - head))}`;
  };
  while (letters > 1 && widthOf(cut(), font) > most) letters -= 1;
  return cut();
}

// Elements by key, made when they are missed and removed when they are not used any more.
class Kept {
  #drawn = new Map();
  #make;
  constructor(makeOne) { this.#make = makeOne; }
  get(key) {
    if (!this.#drawn.has(key)) this.#drawn.set(key, this.#make(key));
    return this.#drawn.get(key);
  }
  only(keys) {
    for (const [key, drawn] of this.#drawn) {
      if (keys.has(key)) continue;
      for (const element of drawn.all) element.remove();
      this.#drawn.delete(key);
    }
  }
}

// Return a function that draws nodes and edges into an element.
//
// describe(node) and explain(edge) return their full texts; choose(key) is called for a node that is clicked.
export function graphIn(box, { describe, explain, choose }) {
  const svg = make("svg", { role: "presentation", focusable: "false" });
  const [boxLayer, edgeLayer, nodeLayer, labelLayer] = ["boxes", "edges", "nodes", "labels"].map((name) => make("g", { class: name }, svg));
  const nothing = document.createElement("p");
  nothing.textContent = "No traffic has been seen yet.";

  const boxes = new Kept(() => {
    const group = make("g", { class: "namespace" }, boxLayer);
    return { all: [group], rect: make("rect", { rx: 10 }, group), name: make("text", {}, group) };
  });
  const nodes = new Kept((key) => {
    const group = make("g", { class: "node", tabindex: "0", role: "button" }, nodeLayer);
    const drawn = {
      all: [group], group,
      rect: make("rect", { class: "box", height: HEIGHT }, group),
      here: make("rect", { class: "here", rx: 2.5, x: 7, y: 10, width: 5, height: HEIGHT - 20 }, group),
      name: make("text", { class: "name", x: 20, y: 20 }, group),
      sub: make("text", { class: "sub", x: 20, y: 36 }, group),
      lock: make("g", { class: "lock" }, group),
      title: make("title", {}, group),
    };
    make("rect", { x: 0, y: 5, width: 11, height: 8, rx: 1.5 }, drawn.lock);
    make("path", { d: "M2.5 5v-2a3 3 0 0 1 6 0v2" }, drawn.lock);
    group.addEventListener("click", () => choose(key));
    group.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(key); }
    });
    return drawn;
  });
  const edges = new Kept(() => {
    const group = make("g", {}, edgeLayer), label = make("g", {}, labelLayer);
    return {
      all: [group, label], group, label,
      path: make("path", {}, group), tip: make("polygon", {}, group), title: make("title", {}, group),
      back: make("rect", { class: "back", rx: 4 }, label),
    };
  });

  function drawNode(node, at, width, { chosen, near }) {
    const drawn = nodes.get(node.key);
    set(drawn.group, { transform: `translate(${at.x} ${at.y})`, "aria-pressed": node.key === chosen });
    const state = {
      service: node.service, local: node.here, troubled: node.state, chosen: node.key === chosen, faint: chosen && !near.has(node.key),
    };
    for (const [name, holds] of Object.entries(state)) drawn.group.classList.toggle(name, Boolean(holds));
    const words = describe(node);
    drawn.group.setAttribute("aria-label", words);
    drawn.title.textContent = words;
    set(drawn.rect, { width, rx: node.service ? HEIGHT / 2 : 8 });
    drawn.name.textContent = fit(node.name, width - (node.identity ? 46 : 32), "600 14px");
    const identity = node.identity ? short(node.identity).replace("spiffe://", "") : "no identity";
    drawn.sub.textContent = fit(node.service ? "service" : node.state || node.address || identity, width - 30, "12px");
    set(drawn.lock, { transform: `translate(${width - 20} 9)`, visibility: node.identity ? "visible" : "hidden" });
  }

  function drawEdge(edge, route, busiest, { chosen }) {
    const drawn = edges.get(edge.key);
    const stroke = 1.5 + 3.5 * Math.sqrt((edge.connections_per_s || 0) / busiest);
    const { tip, segments } = route;
    const [start] = segments;
    set(drawn.path, {
      d: `M${start[0]} ${start[1]}${segments.map((each) => `C${each.slice(2).join(" ")}`).join("")}`, "stroke-width": stroke,
    });
    const wide = 4 + stroke;
    drawn.tip.setAttribute("points", `${tip.x},${tip.y} ${tip.x - tip.way * 10},${tip.y - wide} ${tip.x - tip.way * 10},${tip.y + wide}`);
    drawn.title.textContent = explain(edge);
    const faint = chosen && edge.source !== chosen && edge.target !== chosen ? "faint" : "";
    for (const part of [drawn.group, drawn.label]) part.setAttribute("class", `edge ${edge.kind} ${edge.security} ${faint}`);
    drawn.group.dataset.key = edge.key;
  }

  function drawLabel(edge, spot) {
    const { label, back } = edges.get(edge.key);
    label.toggleAttribute("hidden", !spot);
    label.setAttribute("visibility", spot ? "visible" : "hidden");
    const lines = spot ? linesOf(edge) : [];
    const texts = [...label.querySelectorAll("text")];
    texts.slice(lines.length).forEach((each) => each.remove());
    lines.forEach(([text, className], index) => {
      const line = texts[index] || make("text", {}, label);
      set(line, { class: className, x: spot.x + spot.width / 2, y: spot.y + 12 + index * LINE });
      if (line.textContent !== text) line.textContent = text;
    });
    if (spot) set(back, { x: spot.x, y: spot.y, width: spot.width, height: spot.height });
  }
  const linesOf = (edge) => [...(edge.rate ? [[edge.rate, "rate"]] : []), ...edge.trouble.map((line) => [line, "trouble"])];

  function labelsFor(found, drawnEdges, { chosen }) {
    const crowded = drawnEdges.length > CROWDED;
    const wanted = drawnEdges.filter((edge) => linesOf(edge).length
      && (chosen ? edge.source === chosen || edge.target === chosen : !crowded || edge.trouble.length));
    wanted.sort((a, b) => b.trouble.length - a.trouble.length || (b.connections_per_s || 0) - (a.connections_per_s || 0));
    const taken = [...found.nodes.values()].map(({ x, y }) => ({ x, y, width: found.node, height: HEIGHT }));
    taken.push(...found.boxes.map((each) => ({ x: each.x, y: each.y, width: Math.min(each.width, 160), height: 18 })));
    return place(wanted.map((edge) => ({
      key: edge.key, segments: found.routes.get(edge.key).segments, height: linesOf(edge).length * LINE + 2,
      width: Math.max(...linesOf(edge).map(([text, kind]) => widthOf(text, kind === "trouble" ? "600 12px" : "12px"))) + 8,
    })), taken, found);
  }

  return function draw(shown, drawnEdges, chosen) {
    if (!shown.length) {
      box.replaceChildren(nothing);
      return;
    }
    if (svg.parentNode !== box) box.replaceChildren(svg);
    const found = layout(shown, drawnEdges, box.clientWidth - 8);
    set(svg, { width: found.width, height: found.height, viewBox: `0 0 ${found.width} ${found.height}` });
    const near = new Set(chosen ? [chosen] : []);
    for (const edge of drawnEdges) {
      if (edge.source === chosen) near.add(edge.target);
      if (edge.target === chosen) near.add(edge.source);
    }
    const state = { chosen, near };
    for (const each of found.boxes) {
      const { rect, name } = boxes.get(each.namespace);
      set(rect, { x: each.x, y: each.y, width: each.width, height: each.height });
      set(name, { x: each.x + 10, y: each.y + 15 });
      name.textContent = fit(each.namespace || "no namespace known", each.width - 20, "600 12px");
    }
    for (const node of shown) drawNode(node, found.nodes.get(node.key), found.node, state);
    const busiest = Math.max(1e-9, ...drawnEdges.map((edge) => edge.connections_per_s || 0));
    for (const edge of drawnEdges) drawEdge(edge, found.routes.get(edge.key), busiest, state);
    const spots = labelsFor(found, drawnEdges, state);
    for (const edge of drawnEdges) drawLabel(edge, spots.get(edge.key));
    boxes.only(new Set(found.boxes.map((each) => each.namespace)));
    nodes.only(new Set(shown.map((node) => node.key)));
    edges.only(new Set(drawnEdges.map((edge) => edge.key)));
  };
}
