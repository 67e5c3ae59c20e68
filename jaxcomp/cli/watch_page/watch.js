// Asks for what is new every few seconds, and shows it. Texts of sites enter the page as the text
// of a node only; the page's policy also forbids all that would read them as HTML.

import { draw } from "./chart.js";
import { NONE, bytes, clock, count, counts, duration, number } from "./text.js";

const EVERY = 3000;
const COLUMNS = [
  { key: "site", title: "site", show: (site) => count(site.site), number: true },
  { key: "state", title: "state", show: (site) => site.state + (site.note ? `: ${site.note}` : "") },
  { key: "node", title: "node", show: (site) => site.node || NONE, style: "node" },
  { key: "seen", title: "seen", show: (site) => count(site.seen), number: true },
  { key: "accepted", title: "accepted", show: (site) => count(site.accepted), number: true },
  { key: "late", title: "late", show: (site) => count(site.late), number: true },
  { key: "refused", title: "refused", show: (site) => count(site.refused), number: true },
  { key: "up", title: "up", show: (site) => bytes(site.up), number: true },
  { key: "down", title: "down", show: (site) => bytes(site.down), number: true },
  { key: "age", title: "mean age", show: (site) => number(site.age, 2), number: true },
  { key: "loss", title: "loss", show: (site) => number(site.loss), number: true },
  { key: "steps", title: "steps/s", show: (site) => number(site.steps, 3), number: true },
  { key: "tokens", title: "tokens/s", show: (site) => number(site.tokens, 3), number: true },
  { key: "why", title: "refused as", show: reasons, style: "free" },
];

const at = (id) => document.getElementById(id);
const rounds = { round: [], time: [], seconds: [], loss: [], asked: [], accepted: [], minutes: [] };
const rows = new Map();
const shown = { half: false, byMinutes: false, log: false, sort: "site", down: false };
let epoch = 0, sites = [], status = null, received = 0, lost = null, find = () => null;

function reasons(site) {
  const kinds = counts(site.reasons);
  return site.why.includes(": ") ? `${kinds}; last: ${site.why}` : kinds;
}

function made(name, text, style) {
  const element = document.createElement(name);
  element.textContent = text;
  if (style) element.className = style;
  return element;
}

function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Loss.

function add(news) {
  if (news.after === 0) for (const column of Object.values(rounds)) column.length = 0;
  for (const [name, column] of Object.entries(news.rounds)) {
    for (const value of column) rounds[name].push(value);
  }
  for (let i = rounds.minutes.length; i < rounds.round.length; i++) {
    rounds.minutes.push((rounds.minutes[i - 1] ?? 0) + (rounds.seconds[i] ?? 0) / 60);
  }
}

function drawLoss() {
  const first = shown.half ? rounds.round.length >> 1 : 0;
  const x = (shown.byMinutes ? rounds.minutes : rounds.round).slice(first);
  const nearest = draw(at("chart"), x, rounds.loss.slice(first), shown);
  find = (place) => {
    const found = nearest(place);
    return found === null ? null : first + found;
  };
  set(at("loss-title"), shown.byMinutes ? "Loss by minutes of training" : "Loss by round");
  point(null);
}

function point(place) {
  const i = find(place);
  const said = i === null ? "" : [
    `round ${count(rounds.round[i])}`,
    `loss ${number(rounds.loss[i], 5)}`,
    `${count(rounds.accepted[i])} messages, ${count(rounds.asked[i])} sites asked`,
    rounds.seconds[i] === null ? NONE : `${number(rounds.seconds[i], 3)} s`,
    clock(rounds.time[i]),
  ].join(", ");
  set(at("point"), said);
}

// Numbers.

function drawNumbers() {
  const age = status.age + (performance.now() - received) / 1000;
  const of = status.until === null ? "" : ` of ${count(status.until)}`;
  const left = status.forecast === null ? null : status.forecast - status.now;
  const numbers = [
    ["rounds", count(status.done), of],
    ["loss", number(status.loss, 5), ""],
    ["rounds a minute", status.pace ? number(60 / status.pace, 3) : NONE, ""],
    ["up", bytes(status.up), ""],
    ["down", bytes(status.down), ""],
    ["last line", duration(age), " ago"],
    ["forecast of the end", left === null ? NONE : clock(status.forecast),
      left === null ? "" : ` in ${duration(Math.max(0, left))}`],
  ];
  const list = at("numbers");
  while (list.children.length < numbers.length) {
    const box = document.createElement("div");
    box.append(document.createElement("dt"), document.createElement("dd"));
    list.append(box);
  }
  numbers.forEach(([name, value, more], i) => {
    const [term, said] = list.children[i].children;
    set(term, name);
    said.replaceChildren(value, made("small", more));
  });
  const state = lost === null ? status.state : "no answer";
  at("state").dataset.state = state;
  set(at("state"), state);
  document.title = `${state}, round ${count(status.done)}: jaxcomp watch`;
  const alerts = alertsOf(state, age);
  at("alert").hidden = !alerts;
  set(at("alert"), alerts);
}

function alertsOf(state, age) {
  const said = [];
  if (state === "no answer") {
    said.push(`jaxcomp watch gives no numbers since ${clock(lost.since)}: ${lost.why}`);
  } else if (state === "silent") {
    said.push(`The server has written nothing for ${duration(age)}; ` +
      `twice the longest of its last rounds is ${duration(status.allowed)}.`);
  }
  if (status.error !== null) said.push(`The server's app has ended: ${status.error}`);
  if (Object.keys(status.strangers).length) {
    said.push(`Refused answers of nodes that were not asked: ${counts(status.strangers)}.`);
  }
  if (status.unread) said.push(`${count(status.unread)} lines of the file cannot be read.`);
  return said.join(" ");
}

// Sites.

function compare(a, b) {
  const [one, two] = [a[shown.sort], b[shown.sort]];
  if (one === null || two === null) return (one === null) - (two === null) || a.site - b.site;
  const order = one < two ? -1 : one > two ? 1 : 0;
  return (shown.down ? -order : order) || a.site - b.site;
}

function drawHeads() {
  for (const { key, title, style, number: numeric } of COLUMNS) {
    const head = document.createElement("th");
    const button = made("button", title);
    head.scope = "col";
    head.className = numeric ? "number" : style ?? "";
    button.type = "button";
    button.addEventListener("click", () => {
      shown.down = shown.sort === key ? !shown.down : Boolean(numeric) && key !== "site";
      shown.sort = key;
      drawSites();
    });
    head.append(button);
    at("heads").append(head);
  }
}

function drawSites() {
  COLUMNS.forEach(({ key }, i) => {
    const head = at("heads").children[i];
    if (key === shown.sort) head.setAttribute("aria-sort", shown.down ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  });
  const known = new Set(sites.map((site) => site.site));
  for (const [key, row] of rows) {
    if (!known.has(key)) {
      row.remove();
      rows.delete(key);
    }
  }
  const ordered = [...sites].sort(compare);
  for (const site of ordered) {
    if (!rows.has(site.site)) {
      const row = document.createElement("tr");
      for (const { number: numeric, style } of COLUMNS) {
        row.append(made("td", "", numeric ? "number" : style));
      }
      rows.set(site.site, row);
    }
    COLUMNS.forEach(({ key, show, style }, i) => {
      const cell = rows.get(site.site).children[i];
      const text = show(site);
      set(cell, text);
      if (style) cell.title = text;
      if (key === "state") cell.dataset.state = site.state;
    });
  }
  const body = at("sites");
  ordered.forEach((site, i) => {
    const row = rows.get(site.site);
    if (body.children[i] !== row) body.insertBefore(row, body.children[i] ?? null);
  });
  const states = {};
  for (const { state } of sites) states[state] = (states[state] ?? 0) + 1;
  const refused = counts(status.refused);
  set(at("summary"), counts(states) + (refused ? `. Refused in all: ${refused}` : ""));
}

// What is new.

async function refresh() {
  if (!document.hidden || status === null) {
    try {
      const answer = await fetch(`rounds?epoch=${epoch}&after=${rounds.round.length}`);
      if (!answer.ok) throw new Error(await answer.text());
      const news = await answer.json();
      received = performance.now();
      ({ status, epoch } = news);
      lost = null;
      set(at("folder"), news.folder);
      if (news.sites !== null) {
        add(news);
        sites = news.sites;
        drawLoss();
      }
      drawSites();
    } catch (error) {
      lost = { since: lost?.since ?? Date.now() / 1000, why: error.message };
    }
  }
  if (status !== null) drawNumbers();
  setTimeout(refresh, EVERY);
}

function choose(id, name) {
  at(id).addEventListener("click", () => {
    shown[name] = !shown[name];
    at(id).setAttribute("aria-pressed", shown[name]);
    drawLoss();
  });
}

drawHeads();
choose("half", "half");
choose("by", "byMinutes");
choose("log", "log");
at("chart").addEventListener("pointermove", (event) => {
  point(event.clientX - at("chart").getBoundingClientRect().left);
});
at("chart").addEventListener("pointerleave", () => point(null));
addEventListener("resize", drawLoss);
setInterval(() => status !== null && drawNumbers(), 1000);
refresh();
