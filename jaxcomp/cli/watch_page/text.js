// Numbers as readable text. `null` is a number that is not known.

export const NONE = "–";

const digits = (value, count) => Number(value.toPrecision(count));

export function number(value, count = 4) {
  if (value === null) return NONE;
  if (value !== 0 && (Math.abs(value) >= 1e9 || Math.abs(value) < 1e-4)) {
    return value.toExponential(count - 1);
  }
  return digits(value, count).toLocaleString("en", { maximumFractionDigits: 10 });
}

export function count(value) {
  return value === null ? NONE : value.toLocaleString("en", { maximumFractionDigits: 0 });
}

export function bytes(value) {
  const units = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];
  const found = units.find(([, scale]) => value >= scale);
  return found ? `${(value / found[1]).toPrecision(3)} ${found[0]}` : `${count(value)} B`;
}

export function duration(seconds) {
  const units = [["days", 86400], ["h", 3600], ["min", 60]];
  const found = units.find(([, scale]) => seconds >= 2 * scale);
  return found ? `${(seconds / found[1]).toFixed(1)} ${found[0]}` : `${Math.round(seconds)} s`;
}

export function clock(seconds) {
  const shown = { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" };
  return new Date(1000 * seconds).toLocaleString("en-GB", shown);
}

export function counts(kinds) {
  return Object.entries(kinds).map(([kind, times]) => `${count(times)} ${kind}`).join(", ");
}
