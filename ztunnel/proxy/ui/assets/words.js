// Numbers, times and names as words. Pure.

export function number(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en");
}
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${unit && value < 99.5 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}
export function perSecond(value) {
  if (value === null || value === undefined) return "–";
  return `${value >= 10 || value === 0 ? Math.round(value) : value.toFixed(1)}/s`;
}
export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = parts.findIndex(([size]) => seconds >= size);
  if (first < 0) return "0 s";
  const [size, unit] = parts[first];
  const whole = Math.floor(seconds / size);
  if (first === 3) return `${whole} s`;
  const [nextSize, nextUnit] = parts[first + 1];
  const rest = Math.floor((seconds - whole * size) / nextSize);
  return rest && first < 2 ? `${whole} ${unit} ${rest} ${nextUnit}` : `${whole} ${unit}`;
}
export function moment(seconds) {
  return seconds === null || seconds === undefined ? "–"
    : new Date(seconds * 1000).toISOString().replace("T", " ").replace(/\.\d+Z/, " UTC");
}
export function ago(seconds, now) {
  return seconds === null || seconds === undefined ? "never" : `${span(Math.max(0, now - seconds))} ago`;
}
export function short(identity) {
  return identity.replace(/^spiffe:\/\/[^/]+\/ns\/([^/]+)\/sa\/([^/]+)$/, "$1/$2");
}
