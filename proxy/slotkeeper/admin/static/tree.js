/** The prompt tree, drawn from left to right: a shared prefix is drawn once and branches where prompts diverge. */

import { byId, keyed, onWidth, put, say, svg } from "./dom.js";
import { exact, plural, tokens } from "./format.js";

const ROW = 18; // height of a leaf, pixels
const LEAVES = 12; // leaves that are drawn
const ENDS = 52; // width on the right for the slots' names, pixels
const TOP = 20; // height of the axis, pixels
const TICKS = 4;

/** @param {SVGElement} chart @returns {(tree: object) => void} */
export function tree(chart) {
  let width = 0;
  let last = null;

  function draw() {
    if (last === null || width === 0) return;
    const { nodes, left } = laid(last.nodes);
    const rows = nodes.reduce((most, node) => Math.max(most, node.row + node.rows), 0);
    const longest = Math.max(1, ...nodes.map((node) => node.end));
    const x = (token) => (token / longest) * (width - ENDS);
    put(chart, { height: TOP + rows * ROW + 2, viewBox: `0 0 ${width} ${TOP + rows * ROW + 2}`, width });
    const marks = nodes.length ? ticks(longest) : [];
    keyed(chart, [...marks, ...nodes], (item) => item.key, (item) => (item.node ? makeNode() : makeTick()), (g, item) =>
      item.node ? showNode(g, item, x) : showTick(g, item, x, TOP + rows * ROW),
    );
    say(byId("tree-text"), inWords(last, left));
  }

  onWidth(chart.parentElement, (found) => {
    width = found;
    draw();
  });
  return (found) => {
    last = found;
    draw();
  };
}

/** Give a row to each node that leads to one of the most recent leaves, siblings in the order of the API. */
function laid(nodes) {
  const byParent = Map.groupBy(nodes, (node) => node.parent);
  const leaves = nodes.filter((node) => !byParent.has(node.id));
  const shown = new Set(leaves.toSorted((a, b) => a.idle_seconds - b.idle_seconds).slice(0, LEAVES));
  const placed = [];

  function place(node, row) {
    const below = byParent.get(node.id) ?? [];
    if (below.length === 0) {
      if (!shown.has(node)) return 0;
      placed.push({ ...node, node: true, key: `node ${node.id}`, row, rows: 1, forks: 0, held: node.slots.length > 0 });
      return 1;
    }
    const mine = placed.length;
    let rows = 0;
    for (const child of below) rows += place(child, row + rows);
    if (rows === 0) return 0;
    const held = node.slots.length > 0 || placed.slice(mine).some((inner) => inner.held);
    placed.splice(mine, 0, { ...node, node: true, key: `node ${node.id}`, row, rows, forks: below.length, held });
    return rows;
  }

  let rows = 0;
  for (const root of byParent.get(null) ?? []) rows += place(root, rows);
  return { nodes: placed, left: leaves.length - shown.size };
}

function makeNode() {
  return svg(
    "g",
    { class: "prompt" },
    svg("title"),
    svg("rect", { rx: 2 }),
    svg("circle", { r: 3.5, class: "fork" }),
    svg("path", { class: "kept", d: "M0-4 4 0 0 4-4 0Z" }),
    svg("text", { class: "size" }),
    svg("text", { class: "owner" }),
  );
}

function showNode(g, node, x) {
  const [title, block, fork, kept, size, owner] = g.children;
  const left = x(node.begin);
  const width = Math.max(1, x(node.end) - left - 1);
  const y = TOP + node.row * ROW + 1;
  const height = node.rows * ROW - 2;
  const middle = y + height / 2;
  put(g, { "data-held": node.held ? "" : null, "data-thin": width < 3 ? "" : null });
  put(block, { x: left, y, width, height });
  put(fork, { cx: left + width, cy: middle, visibility: node.forks > 1 ? null : "hidden" });
  const place = Math.max(left + 6, left + width - (node.forks > 1 ? 14 : 7));
  put(kept, { transform: `translate(${place} ${middle})`, visibility: node.snapshots ? null : "hidden" });
  const text = tokens(node.end - node.begin);
  put(size, { x: left + 6, y: middle + 4, visibility: width > 8 * text.length + 24 ? null : "hidden" });
  say(size, text);
  put(owner, { x: left + width + (node.forks > 1 ? 8 : 6), y: middle + 4 });
  say(owner, node.slots.length ? `slot ${node.slots.map((held) => held.slot).join(", ")}` : "");
  say(title, described(node));
}

function described(node) {
  const facts = [`tokens ${exact(node.begin)} to ${exact(node.end)}`, `passed ${plural(node.passed, "time")}`];
  if (node.forks > 1) facts.push(`continues in ${exact(node.ways)} ways`);
  if (node.snapshots) facts.push(plural(node.snapshots, "snapshot"));
  for (const { engine, slot } of node.slots) facts.push(`slot ${slot} of ${engine}`);
  return facts.join(", ");
}

// -- the axis ----------------------------------------------------------------------------------------

function ticks(longest) {
  const rough = longest / TICKS;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, [1, 2, 5, 10].find((factor) => factor * power >= rough) * power);
  const places = Array.from({ length: Math.floor(longest / step) + 1 }, (_, index) => index * step);
  return places.map((at) => ({ key: `tick ${at}`, at }));
}

function makeTick() {
  return svg("g", { class: "tick" }, svg("line"), svg("text", { y: 12 }));
}

function showTick(g, { at }, x, bottom) {
  const [line, label] = g.children;
  put(line, { x1: x(at) + 0.5, x2: x(at) + 0.5, y1: TOP - 4, y2: bottom });
  put(label, { x: x(at), "text-anchor": at === 0 ? "start" : "middle" });
  say(label, at === 0 ? "0 tokens" : tokens(at));
}

function inWords({ nodes, tokens: all, leaves }, left) {
  if (!nodes.length) return "No prompt has been computed yet.";
  const forks = nodes.filter((node) => nodes.some((other) => other.parent === node.id)).length;
  const held = nodes.filter((node) => node.slots.length).length;
  const more = left ? ` The ${LEAVES} used last are drawn.` : "";
  return (
    `${tokens(all)} tokens in ${plural(leaves, "prompt")} that were ever computed, ` +
    `${plural(forks, "branch point")}, ${plural(held, "end")} held by slots.${more}`
  );
}
