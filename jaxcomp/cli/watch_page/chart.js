// A curve as SVG. Of all points in a column of pixels, the first, lowest, highest and last are
// drawn, so that ten thousand rounds look the same and take a few thousand points.

import { number } from "./text.js";

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 58, RIGHT = 14, TOP = 10, BOTTOM = 26;
const DOTS = 80;

function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function ticks(low, high, most) {
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high; at++) found.push(at * step);
  return found;
}

function range(values, log) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value === null || (log && value <= 0)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) return null;
  const scale = log ? Math.log10 : (value) => value;
  const room = 0.04 * (scale(high) - scale(low)) || Math.abs(scale(high)) / 10 || 1;
  return [scale(low) - room, scale(high) + room];
}

// `x` ascends. Returns the index of the point that is nearest to a place of the pointer.
export function draw(svg, x, y, { log }) {
  const width = svg.clientWidth, height = svg.clientHeight;
  const vertical = range(y, log);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  if (vertical === null || !Number.isFinite(vertical[1] - vertical[0])) return () => null;
  const [low, high] = vertical;
  const begin = x[0], end = x.at(-1) > begin ? x.at(-1) : begin + 1;
  const across = (value) => LEFT + (width - LEFT - RIGHT) * ((value - begin) / (end - begin));
  const up = (value) => {
    const scaled = log ? Math.log10(value) : value;
    return height - BOTTOM - (height - TOP - BOTTOM) * ((scaled - low) / (high - low));
  };
  for (const tick of ticks(low, high, height / 38)) {
    const value = log ? 10 ** tick : tick;
    const at = Math.round(up(value));
    svg.append(element("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
    const place = { x: LEFT - 8, y: at + 4, "text-anchor": "end" };
    svg.append(element("text", place, number(value, 3)));
  }
  for (const tick of ticks(begin, end, width / 85)) {
    const at = Math.round(across(tick));
    svg.append(element("line", { class: "grid", x1: at, x2: at, y1: TOP, y2: height - BOTTOM }));
    const text = number(tick, 5);
    const last = at + 4 * text.length > width;
    const place = { x: last ? width - 2 : at, y: height - 8, "text-anchor": last ? "end" : "middle" };
    svg.append(element("text", place, text));
  }
  svg.append(element("path", { class: "curve", d: path(x, y, across, up, log) }));
  for (let i = 0; i < (x.length <= DOTS ? x.length : 0); i++) {
    if (drawn(y[i], log)) {
      svg.append(element("circle", { class: "dot", cx: across(x[i]), cy: up(y[i]), r: 2.2 }));
    }
  }
  const cursor = element("line", { class: "cursor", y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
  svg.append(cursor);
  return (place) => {
    cursor.setAttribute("visibility", place === null ? "hidden" : "visible");
    if (place === null) return null;
    const value = begin + ((place - LEFT) * (end - begin)) / (width - LEFT - RIGHT);
    const found = nearest(x, value);
    for (const name of ["x1", "x2"]) cursor.setAttribute(name, across(x[found]));
    return found;
  };
}

const drawn = (value, log) => value !== null && (!log || value > 0);

function path(x, y, across, up, log) {
  const parts = [];
  let pen = "M", column = [], place = null;
  const flush = () => {
    if (!column.length) return;
    const by = (better) => column.reduce((a, b) => (better(y[b], y[a]) ? b : a));
    const kept = [column[0], by((a, b) => a < b), by((a, b) => a > b), column.at(-1)];
    for (const i of [...new Set(kept)].sort((a, b) => a - b)) {
      parts.push(`${pen}${across(x[i]).toFixed(1)} ${up(y[i]).toFixed(1)}`);
      pen = "L";
    }
    column = [];
  };
  for (let i = 0; i < x.length; i++) {
    const here = drawn(y[i], log) ? Math.floor(across(x[i])) : null;
    if (here !== place) flush();
    if (here === null) pen = "M";
    else column.push(i);
    place = here;
  }
  flush();
  return parts.join("");
}

function nearest(x, value) {
  let low = 0, high = x.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - x[low - 1] < x[low] - value ? low - 1 : low;
}
