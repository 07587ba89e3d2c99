// Finds places for labels along curves, where neither a node nor another label is, and few other curves are. Pure.

const PLACES = [0.5, 0.42, 0.58, 0.34, 0.66, 0.26, 0.74, 0.18, 0.82];
// Where a label begins, left of its point of the curve, as a share of its width: in the middle, or at the side.
const BEFORE = [0.5, 0.08, 0.92];
const APART = 2, SAMPLES = 20;

const overlap = (a, b) => a.x < b.x + b.width + APART && b.x < a.x + a.width + APART
  && a.y < b.y + b.height + APART && b.y < a.y + a.height + APART;

// Return the point of a curve at a share of its length, which is measured by its segments' chords.
export function pointAt(segments, share) {
  const lengths = segments.map(([x1, y1, , , , , x2, y2]) => Math.hypot(x2 - x1, y2 - y1) || 1);
  let left = share * lengths.reduce((a, b) => a + b, 0), place = 0;
  while (place < segments.length - 1 && left > lengths[place]) { left -= lengths[place]; place += 1; }
  const t = Math.min(1, left / lengths[place]), u = 1 - t;
  const [x1, y1, cx1, cy1, cx2, cy2, x2, y2] = segments[place];
  const at = (a, b, c, d) => u * u * u * a + 3 * u * u * t * b + 3 * u * t * t * c + t * t * t * d;
  return [at(x1, cx1, cx2, x2), at(y1, cy1, cy2, y2)];
}

// Return key -> rectangle of the labels that have a place. The first labels choose first.
//
// labels: {key, width, height, segments}; taken: rectangles that stay free; room: {width, height, routes} of the picture.
export function place(labels, taken, room) {
  const found = new Map(), all = [...taken];
  const points = [...room.routes].flatMap(([edge, { segments }]) => (
    Array.from({ length: SAMPLES }, (_, index) => ({ edge, at: pointAt(segments, (index + 0.5) / SAMPLES) }))));
  for (const { key, width, height, segments } of labels) {
    let best = null, fewest = Infinity;
    for (const before of BEFORE) {
      for (const share of PLACES) {
        const [x, y] = pointAt(segments, share);
        const left = Math.max(0, Math.min(room.width - width, x - before * width));
        const spot = { x: left, y: Math.max(0, Math.min(room.height - height, y - height / 2)), width, height };
        if (all.some((each) => overlap(spot, each))) continue;
        const covered = points.filter(({ edge, at: [px, py] }) => (
          edge !== key && px > spot.x && px < spot.x + width && py > spot.y && py < spot.y + height)).length;
        if (covered < fewest) [best, fewest] = [spot, covered];
      }
    }
    if (!best) continue;
    all.push(best);
    found.set(key, best);
  }
  return found;
}
