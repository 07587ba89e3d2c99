// Draws workloads and their traffic as SVG, in columns: those that only call, those that do both, those that are
// only called. Elements are kept from event to event, so that focus and hover stay. All text goes through
// textContent: names come from the mesh and are not trusted.
"use strict";

const Graph = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const HEIGHT = 54, GAP = 24, TOP = 12, LANE = 20, LEAST_STEP = 140;

  function make(tag, attributes, parent) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (parent) parent.append(element);
    return element;
  }

  // Cut from the middle: both ends of a name tell pods apart.
  function fit(text, most) {
    if (text.length <= most) return text;
    const head = Math.ceil((most - 1) * 0.6);
    return text.slice(0, head) + "…" + text.slice(text.length - (most - 1 - head));
  }

  // Return the columns, and the lanes: an edge that passes a column gets a place in it, so that it runs between
  // boxes and not behind them. Within columns the order is by the mean place of neighbours, so that few edges cross.
  function layout(workloads, edges) {
    const calls = new Set(), called = new Set();
    for (const edge of edges) {
      if (edge.source === edge.destination) continue;
      calls.add(edge.source);
      called.add(edge.destination);
    }
    const columns = [[], [], []];
    for (const workload of workloads) {
      const column = !called.has(workload.key) ? 0 : !calls.has(workload.key) ? 2 : 1;
      columns[column].push(workload.key);
    }
    const lanes = new Map();
    const all = [];
    for (const edge of edges) {
      const passes = columns[1].length && columns[0].includes(edge.source) && columns[2].includes(edge.destination);
      if (!passes) { all.push([edge.source, edge.destination]); continue; }
      const lane = `lane ${edge.key}`;
      lanes.set(edge.key, lane);
      columns[1].push(lane);
      all.push([edge.source, lane], [lane, edge.destination]);
    }
    const used = columns.filter((column) => column.length);
    const place = new Map();
    const number = () => used.forEach((column) => column.forEach((key, index) => place.set(key, index / column.length)));
    for (const column of used) column.sort();
    number();
    for (let round = 0; round < 4; round++) {
      for (const column of used) {
        const mean = new Map(column.map((key) => {
          const near = all.filter((ends) => ends.includes(key))
            .map(([from, to]) => place.get(from === key ? to : from));
          return [key, near.length ? near.reduce((a, b) => a + b, 0) / near.length : place.get(key)];
        }));
        column.sort((a, b) => mean.get(a) - mean.get(b) || (a < b ? -1 : 1));
        number();
      }
    }
    return { columns: used, lanes };
  }

  function create(box, describe, choose) {
    const svg = make("svg", { role: "presentation", focusable: "false" });
    const edgeLayer = make("g", {}, svg), nodeLayer = make("g", {}, svg), textLayer = make("g", {}, svg);
    const nodes = new Map(), edgesDrawn = new Map();
    const nothing = document.createElement("p");
    nothing.textContent = "No traffic has been seen yet.";

    function nodeFor(key) {
      let drawn = nodes.get(key);
      if (drawn) return drawn;
      const group = make("g", { class: "node", tabindex: "0", role: "button" }, nodeLayer);
      drawn = {
        group,
        box: make("rect", { class: "box", rx: 9, height: HEIGHT }, group),
        here: make("rect", { class: "here", rx: 2.5, x: 7, y: 11, width: 5, height: HEIGHT - 22 }, group),
        name: make("text", { class: "name", x: 21, y: 23 }, group),
        sub: make("text", { class: "sub", x: 21, y: 41 }, group),
        lock: make("g", { class: "lock" }, group),
        title: make("title", {}, group),
      };
      make("rect", { x: 0, y: 5, width: 11, height: 8, rx: 1.5 }, drawn.lock);
      make("path", { d: "M2.5 5v-2a3 3 0 0 1 6 0v2" }, drawn.lock);
      const act = () => choose(key);
      group.addEventListener("click", act);
      group.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(); }
      });
      nodes.set(key, drawn);
      return drawn;
    }

    function edgeFor(key) {
      let drawn = edgesDrawn.get(key);
      if (drawn) return drawn;
      const group = make("g", { class: "edge" }, edgeLayer);
      const label = make("g", { class: "edge" }, textLayer);
      drawn = {
        group, label,
        path: make("path", {}, group), tip: make("polygon", {}, group),
        back: make("rect", { class: "back", height: 17, rx: 4 }, label),
        rate: make("text", {}, label), failures: make("text", { class: "failures" }, label),
      };
      edgesDrawn.set(key, drawn);
      return drawn;
    }

    function draw(workloads, edges, chosen) {
      const present = new Set(edges.flatMap((edge) => [edge.source, edge.destination]));
      const shown = workloads.filter((workload) => present.has(workload.key));
      if (!shown.length) {
        box.replaceChildren(nothing);
        return;
      }
      if (svg.parentNode !== box) box.replaceChildren(svg);
      const byKey = new Map(shown.map((workload) => [workload.key, workload]));
      const { columns, lanes } = layout(shown, edges);
      const room = box.clientWidth - 8;
      const loops = edges.some((edge) => edge.source === edge.destination);
      const right = loops ? 60 : 2;
      const wanted = (room - right - 2 - LEAST_STEP * (columns.length - 1)) / columns.length;
      const width = Math.max(170, Math.min(260, wanted));
      const step = columns.length > 1
        ? Math.max(width + LEAST_STEP, (room - right - 2 - width) / (columns.length - 1)) : 0;
      const total = 2 + width + step * (columns.length - 1) + right;
      const tall = (key) => (byKey.has(key) ? HEIGHT : LANE);
      const tallness = (column) => column.reduce((sum, key) => sum + tall(key) + GAP, -GAP);
      const height = TOP * 2 + Math.max(...columns.map(tallness));
      svg.setAttribute("width", total);
      svg.setAttribute("height", height);
      svg.setAttribute("viewBox", `0 0 ${total} ${height}`);

      const at = new Map();
      columns.forEach((column, index) => {
        let y = (height - tallness(column)) / 2;
        for (const key of column) {
          at.set(key, { x: 2 + index * step, y, middle: y + tall(key) / 2, column: index });
          y += tall(key) + GAP;
        }
      });
      const near = new Set(chosen ? [chosen] : []);
      for (const edge of edges) {
        if (edge.source === chosen) near.add(edge.destination);
        if (edge.destination === chosen) near.add(edge.source);
      }

      for (const [key, drawn] of nodes) if (!byKey.has(key)) { drawn.group.remove(); nodes.delete(key); }
      for (const key of columns.flat().filter((each) => byKey.has(each))) {
        const workload = byKey.get(key), drawn = nodeFor(key), { x, y } = at.get(key);
        const letters = Math.floor((width - 60) / 8.4);
        drawn.group.setAttribute("transform", `translate(${x} ${y})`);
        drawn.group.classList.toggle("local", workload.here);
        drawn.group.classList.toggle("troubled", Boolean(workload.state));
        drawn.group.classList.toggle("chosen", key === chosen);
        drawn.group.classList.toggle("faint", Boolean(chosen) && !near.has(key));
        drawn.group.setAttribute("aria-pressed", key === chosen);
        const words = describe(workload);
        drawn.group.setAttribute("aria-label", words);
        drawn.title.textContent = words;
        drawn.box.setAttribute("width", width);
        drawn.name.textContent = fit(workload.name, letters);
        drawn.sub.textContent = fit(
          workload.state || [workload.namespace, workload.address].filter(Boolean).join(" · ")
            || (workload.identity ? workload.identity.replace("spiffe://", "") : "no identity"),
          Math.floor((width - 34) / 6.3));
        drawn.lock.setAttribute("transform", `translate(${width - 22} 11)`);
        drawn.lock.setAttribute("visibility", workload.identity ? "visible" : "hidden");
      }

      const busiest = Math.max(1e-9, ...edges.map((edge) => edge.connections_per_s || 0));
      // Ends of edges are spread along a box's side, in the order of the boxes at their other ends.
      const sides = new Map();
      const side = (key, which) => {
        const name = which + key;
        if (!sides.has(name)) sides.set(name, []);
        return sides.get(name);
      };
      for (const edge of edges) {
        if (edge.source === edge.destination || !at.has(edge.source) || !at.has(edge.destination)) continue;
        const back = at.get(edge.source).column >= at.get(edge.destination).column;
        side(edge.source, back ? "left" : "right").push(edge);
        side(edge.destination, "left").push(edge);
      }
      const end = (key, which, edge) => {
        const ends = side(key, which);
        const other = (each) => at.get(lanes.get(each.key) || (each.source === key ? each.destination : each.source)).middle;
        ends.sort((a, b) => other(a) - other(b) || (a.key < b.key ? -1 : 1));
        return at.get(key).y + HEIGHT * (ends.indexOf(edge) + 1) / (ends.length + 1);
      };

      const drawnNow = new Set();
      const crowded = edges.length > 24;
      for (const edge of edges) {
        const from = at.get(edge.source), to = at.get(edge.destination);
        if (!from || !to) continue;
        drawnNow.add(edge.key);
        const drawn = edgeFor(edge.key);
        const rate = edge.connections_per_s || 0;
        const stroke = rate ? 1.5 + 3.5 * Math.sqrt(rate / busiest) : 1.5;
        const touches = !chosen || edge.source === chosen || edge.destination === chosen;
        let x1, y1, x2, y2, d, lx, ly;
        if (from === to) {
          x1 = from.x + width; y1 = from.y + HEIGHT * 0.3; x2 = x1; y2 = from.y + HEIGHT * 0.7;
          d = `M${x1} ${y1} C${x1 + 46} ${y1 - 16} ${x1 + 46} ${y2 + 16} ${x2 + 8} ${y2}`;
          lx = x1 + 34; ly = from.y + HEIGHT + 4;
        } else if (lanes.has(edge.key)) {
          const lane = at.get(lanes.get(edge.key)), y = lane.middle;
          x1 = from.x + width; y1 = end(edge.source, "right", edge); x2 = to.x; y2 = end(edge.destination, "left", edge);
          const left = lane.x, rightEnd = lane.x + width, before = (left - x1) * 0.45, after = (x2 - rightEnd) * 0.45;
          d = `M${x1} ${y1} C${x1 + before} ${y1} ${left - before} ${y} ${left} ${y} H${rightEnd} `
            + `C${rightEnd + after} ${y} ${x2 - after} ${y2} ${x2 - 9} ${y2}`;
          lx = (left + rightEnd) / 2; ly = y;
        } else if (from.column < to.column) {
          x1 = from.x + width; y1 = end(edge.source, "right", edge); x2 = to.x; y2 = end(edge.destination, "left", edge);
          const bend = (x2 - x1) * 0.45;
          d = `M${x1} ${y1} C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2 - 9} ${y2}`;
          lx = (x1 + x2) / 2; ly = (y1 + y2) / 2;
        } else {  // within a column, or back: around the left side
          x1 = from.x; y1 = end(edge.source, "left", edge); x2 = to.x; y2 = end(edge.destination, "left", edge);
          const out = Math.min(x1, x2) - 50;
          d = `M${x1} ${y1} C${out} ${y1} ${out} ${y2} ${x2 - 9} ${y2}`;
          lx = Math.max(40, out + 12); ly = (y1 + y2) / 2;
        }
        drawn.path.setAttribute("d", d);
        drawn.path.setAttribute("stroke-width", stroke);
        const tip = from === to ? [[x2, y2], [x2 + 9, y2 - 5], [x2 + 9, y2 + 5]]
          : [[x2, y2], [x2 - 9, y2 - 5], [x2 - 9, y2 + 5]];
        drawn.tip.setAttribute("points", tip.map((point) => point.join(",")).join(" "));
        for (const part of [drawn.group, drawn.label]) {
          part.classList.toggle("plain", edge.security === "plain");
          part.classList.toggle("nothing", edge.security === "none");
          part.classList.toggle("faint", !touches);
        }
        drawn.group.classList.toggle("quiet", !rate && !edge.open);
        drawn.rate.textContent = crowded && !(chosen && touches) ? "" : edge.label;
        drawn.rate.setAttribute("x", lx);
        drawn.rate.setAttribute("y", ly + 4);
        const long = drawn.rate.textContent.length * 6.4 + 10;
        drawn.back.setAttribute("x", lx - long / 2);
        drawn.back.setAttribute("y", ly - 8.5);
        drawn.back.setAttribute("width", drawn.rate.textContent ? long : 0);
        drawn.failures.textContent = edge.trouble && `● ${edge.trouble}`;
        drawn.failures.setAttribute("x", lx);
        drawn.failures.setAttribute("y", drawn.rate.textContent ? ly + 19 : ly + 4);
      }
      for (const [key, drawn] of edgesDrawn) {
        if (!drawnNow.has(key)) { drawn.group.remove(); drawn.label.remove(); edgesDrawn.delete(key); }
      }
    }

    return { draw };
  }

  return { create };
})();
