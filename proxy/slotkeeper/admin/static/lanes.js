/** Conversations as lanes over time: a bar for each request, as wide as the time that it took. */

import { byId, el, keyed, onWidth, put, say, svg } from "./dom.js";
import { conversation, plural, seconds, time } from "./format.js";
import { describeCounts, hitRate, shares } from "./shares.js";

const LANES = 12;
const HEIGHT = 32; // pixels
const NARROW = 3; // least width of a bar, pixels
// Seconds that the axis covers, and seconds between two of its marks.
const SPANS = [[30, 10], [60, 15], [120, 30], [300, 60], [600, 120], [1200, 300], [1800, 300], [3600, 600]];

/**
 * @param {Element} parent
 * @returns {(requests: object[], now: number) => void} `requests` newest first; `now` in ms
 */
export function lanes(parent) {
  const axis = byId("axis");
  let width = 0;
  let last = null;

  function draw() {
    if (last === null || width === 0) return;
    const { rows, now } = last;
    const oldest = Math.min(...rows.flatMap((row) => row.requests.map((request) => request.from)), now);
    const [span, step] = SPANS.find(([span]) => oldest > now - span * 1000) ?? SPANS.at(-1);
    const x = (at) => width * (1 - (now - at) / (span * 1000));
    const tallest = Math.max(1, ...rows.flatMap((row) => row.requests.map((r) => r.prompt_tokens ?? 0)));
    keyed(parent, rows, (row) => row.key, makeLane, (node, row) => showLane(node, row, { x, now, tallest }));
    drawAxis(axis, width, rows.length ? span : 0, step);
  }

  onWidth(axis, (found) => {
    width = found;
    draw();
  });
  walkable(parent);
  return (requests, now) => {
    last = { rows: rowsOf(requests, now), now };
    byId("lanes-empty").hidden = requests.length > 0;
    draw();
  };
}

/** The latest conversations, newest first; the requests of each, oldest first. */
function rowsOf(requests, now) {
  const rows = new Map();
  for (const request of requests) {
    const key = request.conversation ?? request.name; // queued requests of new conversations have no number yet
    if (!rows.has(key)) rows.set(key, { key, name: conversation(request, now), model: request.model, requests: [] });
    const from = Date.parse(request.came);
    rows.get(key).requests.unshift({ ...request, from, key: `${request.id} ${request.came}` });
  }
  return [...rows.values()].slice(0, LANES);
}

function makeLane() {
  const chart = svg("svg", { class: "lane", role: "group", height: HEIGHT });
  return el("li", {}, el("p", { class: "name" }, el("span"), el("span", { class: "quiet" })), chart);
}

function showLane(node, row, scale) {
  const [label, chart] = node.children;
  const [name, figure] = label.children;
  const sum = total(row.requests);
  say(name, row.name);
  put(name, { title: [row.name, row.model].filter(Boolean).join(" · ") });
  say(figure, `${row.requests.length} · ${hitRate(sum)}`);
  put(chart, { "aria-label": `${row.name}: ${plural(row.requests.length, "request")}, ${hitRate(sum)} reused` });
  keyed(chart, row.requests, (request) => request.key, makeBar, (bar, request) => showBar(bar, request, scale));
  settleFocus(chart);
}

function total(requests) {
  const counted = requests.filter((request) => request.reused != null);
  const sum = (name) => counted.reduce((subtotal, request) => subtotal + request[name], 0);
  return { reused: sum("reused"), prompt_tokens: sum("prompt_tokens") };
}

function makeBar(request) {
  const parts = ["frame", "reused", "computed", "repeated"].map((kind) => svg("rect", { class: kind }));
  const href = `#request=${encodeURIComponent(request.id)}`;
  return svg("a", { class: "bar", href, tabindex: -1 }, svg("title"), ...parts);
}

function showBar(bar, request, { x, now, tallest }) {
  const [title, frame, ...pieces] = bar.children;
  const took = request.seconds ?? (now - request.from) / 1000;
  const left = x(request.from);
  const width = Math.max(NARROW, x(request.from + took * 1000) - left);
  const height = HEIGHT * (0.35 + 0.65 * ((request.prompt_tokens ?? 0) / tallest)) - 2;
  const text = `${time(request.came)}, ${seconds(took)}, ${describeCounts(request)}. ${request.verdict}`;
  say(title, text);
  put(bar, { "aria-label": `Why: ${text}`, "data-running": request.outcome === "running" ? "" : null });
  const column = { x: left.toFixed(1), width: width.toFixed(1) };
  put(frame, { ...column, y: HEIGHT - 1 - height, height });
  const parts = shares(request) ?? { reused: 0, computed: 0, repeated: 0 };
  let y = HEIGHT - 1;
  for (const piece of pieces) {
    const size = parts[piece.getAttribute("class")] * height;
    y -= size;
    put(piece, { ...column, y: y.toFixed(2), height: size.toFixed(2) });
  }
}

/** Draw the marks of `span` seconds; 0: none. */
function drawAxis(axis, width, span, step) {
  const marks = Array.from({ length: span ? span / step + 1 : 0 }, (_, index) => index * step);
  keyed(axis, marks, (ago) => ago, () => svg("text", { y: 12 }), (node, ago) => {
    put(node, { x: width * (1 - ago / span), "text-anchor": { 0: "end", [span]: "start" }[ago] ?? "middle" });
    say(node, ago === 0 ? "now" : ago < 60 || ago % 60 ? `−${ago} s` : `−${ago / 60} min`);
  });
}

// -- the keyboard ------------------------------------------------------------------------------------

/** Keyboard: Tab reaches one bar of each lane, and the arrow keys move along the lane. */
function walkable(parent) {
  parent.addEventListener("keydown", (event) => {
    const bar = event.target.closest(".bar");
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!bar || !step) return;
    const next = step < 0 ? bar.previousElementSibling : bar.nextElementSibling;
    if (next) reach(next);
    event.preventDefault();
  });
}

function reach(bar) {
  for (const other of bar.parentNode.children) put(other, { tabindex: other === bar ? 0 : -1 });
  bar.focus();
}

function settleFocus(chart) {
  const bars = [...chart.children];
  if (!bars.some((bar) => bar.getAttribute("tabindex") === "0")) put(bars.at(-1), { tabindex: 0 });
}
