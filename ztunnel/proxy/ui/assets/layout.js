// Places nodes, the boxes of their namespaces, and the curves between nodes. Pure: numbers in, numbers out.
//
// Columns follow the calls: a node stands right of those that call it. Each namespace is a band of rows of its own,
// so that boxes cannot overlap. A curve that passes a column has a lane there, between the nodes. Where there is room
// for one column only, curves run beside it.

export const HEIGHT = 46;
const GAP = 14, PAD = 10, HEAD = 22, LANE = 16, BAND = 14;
const LEAST = 150, MOST = 230, BETWEEN = 130, GUTTER = 112, TIP = 9;

// Return how many calls lie before each node, without those that close a circle.
function ranks(keys, edges) {
  const calls = new Map(keys.map((key) => [key, []])), called = new Set();
  for (const { source, target } of edges) {
    if (source === target) continue;
    calls.get(source).push(target);
    called.add(target);
  }
  const rank = new Map(keys.map((key) => [key, 0]));
  const done = [], state = new Map(), onward = new Map();
  const visit = (key) => {
    state.set(key, "begun");
    onward.set(key, calls.get(key).filter((next) => state.get(next) !== "begun"));
    for (const next of onward.get(key)) if (!state.has(next)) visit(next);
    state.set(key, "done");
    done.push(key);
  };
  for (const key of [...keys].sort((a, b) => called.has(a) - called.has(b))) if (!state.has(key)) visit(key);
  for (const key of done.reverse()) {
    for (const next of onward.get(key)) rank.set(next, Math.max(rank.get(next), rank.get(key) + 1));
  }
  return rank;
}

// Return the widths: of a node, from column to column, and of the margin at the right.
function columnsIn(room, count, arcs) {
  const inner = Math.max(room, 220) - 2 * PAD - 2;
  const right = arcs ? GUTTER : 0;
  if (count === 1) return { width: Math.min(MOST + 40, inner - GUTTER), step: 0, reach: GUTTER - 2 * TIP };
  const width = Math.min(MOST, Math.max(110, (inner - right - BETWEEN * (count - 1)) / count));
  const step = (inner - right - width) / (count - 1);
  return { width, step, reach: Math.min(GUTTER, step - width) - 2 * TIP };
}

// Return bands, each {namespace, columns: lists of items}; an item is a node's key, or a lane's.
function bandsOf(nodes, edges, column, count) {
  const names = [...new Set(nodes.map((node) => node.namespace || ""))];
  const first = (name) => Math.min(...nodes.filter((node) => (node.namespace || "") === name).map((node) => column.get(node.key)));
  names.sort((a, b) => (a === "") - (b === "") || first(a) - first(b) || (a < b ? -1 : 1));
  const bands = new Map(names.map((name) => [name, { namespace: name, columns: Array.from({ length: count }, () => []) }]));
  const home = new Map(nodes.map((node) => [node.key, bands.get(node.namespace || "")]));
  for (const node of [...nodes].sort((a, b) => (a.key < b.key ? -1 : 1))) {
    home.get(node.key).columns[column.get(node.key)].push(node.key);
  }
  const lanes = new Map();
  for (const edge of edges) {
    const [from, to] = [column.get(edge.source), column.get(edge.target)];
    const passed = [];
    for (let place = from + Math.sign(to - from); from !== to && place !== to; place += Math.sign(to - from)) {
      const lane = `lane ${place} ${edge.key}`;
      home.get(edge.target).columns[place].push(lane);
      passed.push(lane);
    }
    lanes.set(edge.key, passed);
  }
  return { bands: [...bands.values()], lanes };
}

// Return the vertical place of every item, and of every band.
function stacked(bands, isNode) {
  const at = new Map();
  const tall = (item) => (isNode(item) ? HEIGHT : LANE);
  let y = 1;
  for (const band of bands) {
    const stacks = band.columns.map((items) => items.reduce((sum, item) => sum + tall(item) + GAP, -GAP));
    const most = Math.max(...stacks);
    band.columns.forEach((items, place) => {
      let top = y + HEAD + (most - stacks[place]) / 2;
      for (const item of items) {
        at.set(item, { y: top, middle: top + tall(item) / 2, column: place });
        top += tall(item) + GAP;
      }
    });
    band.y = y;
    band.height = HEAD + most + PAD;
    y += band.height + BAND;
  }
  return { at, height: y - BAND + 1 };
}

// Order the items of each column by the mean place of their neighbours, so that few curves cross.
//
// first: what comes before that, as a number of an item.
function ordered(bands, links, isNode, first) {
  const near = new Map();
  for (const [a, b] of links) {
    for (const [one, other] of [[a, b], [b, a]]) near.set(one, [...(near.get(one) || []), other]);
  }
  let placed = stacked(bands, isNode);
  for (let round = 0; round < 4; round++) {
    for (const band of bands) {
      for (const items of band.columns) {
        const mean = new Map(items.map((item) => {
          const places = (near.get(item) || []).map((other) => placed.at.get(other).middle);
          return [item, places.length ? places.reduce((a, b) => a + b, 0) / places.length : placed.at.get(item).middle];
        }));
        items.sort((a, b) => first(a) - first(b) || mean.get(a) - mean.get(b) || (a < b ? -1 : 1));
      }
    }
    placed = stacked(bands, isNode);
  }
  return placed;
}

const curve = (x1, y1, x2, y2) => [x1, y1, x1 + (x2 - x1) * 0.45, y1, x2 - (x2 - x1) * 0.45, y2, x2, y2];

// Return the curve of each edge: {segments, tip}; a segment has the eight numbers of a cubic curve, and the tip is
// where the arrow ends, with the direction in which it points.
function routes(edges, lanes, at, width, reach) {
  const sides = new Map();
  const sideOf = (edge) => {
    const [from, to] = [at.get(edge.source).column, at.get(edge.target).column];
    return { leave: to >= from ? "right" : "left", arrive: to > from ? "left" : "right" };
  };
  const chain = (edge) => [edge.source, ...lanes.get(edge.key), edge.target];
  const touch = (key, side, edge, other, end) => {
    const name = side + key;
    if (!sides.has(name)) sides.set(name, []);
    sides.get(name).push({ edge: edge.key, other: at.get(other).middle, end });
  };
  for (const edge of edges) {
    const { leave, arrive } = sideOf(edge), along = chain(edge);
    touch(edge.source, leave, edge, along[1], false);
    touch(edge.target, arrive, edge, along.at(-2), true);
  }
  for (const ends of sides.values()) ends.sort((a, b) => a.other - b.other || (a.edge < b.edge ? -1 : 1));
  const port = (key, side, edge, end) => {
    const ends = sides.get(side + key);
    const place = ends.findIndex((each) => each.edge === edge.key && each.end === end);
    return at.get(key).y + HEIGHT * (place + 1) / (ends.length + 1);
  };
  return new Map(edges.map((edge) => {
    const { leave, arrive } = sideOf(edge), from = at.get(edge.source), to = at.get(edge.target);
    const y1 = port(edge.source, leave, edge, false), y2 = port(edge.target, arrive, edge, true);
    if (from.column === to.column) {
      const x = from.x + width, out = x + Math.min(reach, 26 + Math.abs(y2 - y1) * 0.2) * 4 / 3;
      return [edge.key, { segments: [[x, y1, out, y1, out, y2, x + TIP, y2]], tip: { x, y: y2, way: -1 } }];
    }
    const way = to.column > from.column ? 1 : -1;
    const before = (place) => (way > 0 ? place.x : place.x + width), after = (place) => (way > 0 ? place.x + width : place.x);
    const segments = [];
    let [x, y] = [after(from), y1];
    for (const lane of lanes.get(edge.key).map((each) => at.get(each))) {
      segments.push(curve(x, y, before(lane), lane.middle), curve(before(lane), lane.middle, after(lane), lane.middle));
      [x, y] = [after(lane), lane.middle];
    }
    segments.push(curve(x, y, before(to) - way * TIP, y2));
    return [edge.key, { segments, tip: { x: before(to), y: y2, way } }];
  }));
}

// Return {width, height, node (a node's width), nodes: key -> {x, y}, boxes, routes: edge's key -> curve}.
//
// nodes: {key, namespace}; edges: {key, source, target} between them; room: the width that there is.
export function layout(nodes, edges, room) {
  const rank = ranks(nodes.map((node) => node.key), edges);
  const deepest = Math.max(...rank.values());
  const fitting = Math.floor((room - 2 * PAD - 2 + BETWEEN) / (LEAST + BETWEEN));
  const count = Math.max(1, Math.min(deepest + 1, fitting));
  const column = new Map([...rank].map(([key, value]) => [key, Math.floor(value * count / (deepest + 1))]));
  const arcs = edges.some((edge) => column.get(edge.source) === count - 1 && column.get(edge.target) === count - 1);
  const { width, step, reach } = columnsIn(room, count, arcs);
  const { bands, lanes } = bandsOf(nodes, edges, column, count);
  const links = edges.flatMap((edge) => {
    const along = [edge.source, ...lanes.get(edge.key), edge.target];
    return along.slice(1).map((each, index) => [along[index], each]);
  });
  const { at, height } = ordered(bands, links, (item) => column.has(item), (item) => (count === 1 ? rank.get(item) : 0));
  for (const place of at.values()) place.x = PAD + 1 + place.column * step;
  const boxes = bands.map((band) => {
    const used = band.columns.flatMap((items, place) => (items.some((item) => column.has(item)) ? [place] : []));
    const [first, last] = [Math.min(...used), Math.max(...used)];
    return { namespace: band.namespace, x: 1 + first * step, y: band.y, width: (last - first) * step + width + 2 * PAD, height: band.height };
  });
  const right = count === 1 || arcs ? GUTTER : 0;
  const total = 2 * PAD + 2 + (count - 1) * step + width + right;
  return {
    width: total, height, node: width, boxes,
    nodes: new Map(nodes.map((node) => [node.key, at.get(node.key)])),
    routes: routes(edges, lanes, at, width, reach),
  };
}
