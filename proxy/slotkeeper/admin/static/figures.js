/** The figures at the top, each with a sparkline of the last half hour. */

import { el, put, say, svg } from "./dom.js";
import { exact, percent, ratio, seconds, timeSaved, tokens } from "./format.js";
import { shareBar, showShares } from "./shares.js";

const WIDTH = 160;
const HEIGHT = 36;
const EDGE = 3; // margin, so that lines are not cut off
const BUCKET = 10; // seconds of one point

/**
 * @typedef {object} Figure
 * @property {string} name its heading
 * @property {(totals: object) => string} value
 * @property {(totals: object) => string} note
 * @property {(history: object[]) => (number|null)[]} course one value for each bucket
 * @property {(value: number) => string} written formats one value of the course
 * @property {[number, number]} range what the axis covers at least
 * @property {number} [mark] a perfect value, drawn as a horizontal line
 */

/** What the ratio leaves out is said with its number: what is unknown is not perfect. */
function waitedNote({ total, unknown_text: unknown }) {
  if (unknown || total == null) return unknown || "1.00 is perfect";
  return `1.00 is perfect; ${ratio(total)} in total, with idle work (prefill amplification)`;
}

function savedNote({ requests, saved_seconds: saved }) {
  if (requests && saved == null) return "no engine has shown its prefill speed";
  return `in ${exact(requests)} requests, less what the steps before them took`;
}

/** @type {Figure[]} */
const FIGURES = [
  {
    name: "Waited, against the least possible",
    value: ({ waited }) => ratio(waited),
    note: waitedNote,
    course: (history) => history.map(({ waited }) => waited),
    written: ratio,
    range: [0.8, 1.5],
    mark: 1,
  },
  {
    name: "Hit rate",
    value: ({ hit_rate: rate }) => percent(rate),
    note: (totals) => `${tokens(totals.reused)} of ${tokens(totals.prompt_tokens)} prompt tokens reused`,
    course: (history) => history.map(({ hit_rate: rate }) => rate),
    written: percent,
    range: [0, 1],
  },
  {
    name: "Waiting saved",
    value: timeSaved,
    note: savedNote,
    course: (history) => {
      let sum = 0;
      return history.map(({ saved_seconds: saved }) => (saved == null ? null : (sum += saved)));
    },
    written: seconds,
    range: [0, 0.1],
  },
];

/** @param {Element} parent @returns {(state: object) => void} */
export function figures(parent) {
  const tiles = FIGURES.map(tile);
  const division = divisionTile();
  parent.append(...tiles.map(({ node }) => node), division.node);
  return (state) => {
    for (const { show } of tiles) show(state);
    division.show(state.totals);
  };
}

function tile(figure) {
  const value = el("p", { class: "value" });
  const note = el("p", { class: "quiet" });
  const line = svg("polyline", { class: "course" });
  const dot = svg("path", { class: "point" });
  const mark = svg("line", { class: "mark", x1: 0, x2: WIDTH });
  const frame = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" };
  const chart = svg("svg", { class: "spark", role: "img", ...frame }, mark, line, dot);
  const node = el("div", { class: "card figure" }, el("h3", { say: figure.name }), value, chart, note);
  return {
    node,
    show({ totals, history }) {
      say(value, figure.value(totals));
      say(note, figure.note(totals));
      drawCourse(figure, history, { line, dot, mark, chart });
    },
  };
}

function drawCourse({ course, written, range, mark: perfect, name }, history, { line, dot, mark, chart }) {
  const values = course(history);
  const points = history.map(({ at }, index) => ({ at, value: values[index] })).filter((p) => p.value != null);
  const low = Math.min(range[0], ...points.map((p) => p.value));
  const high = Math.max(range[1], ...points.map((p) => p.value));
  const first = points[0]?.at ?? 0;
  const span = Math.max(BUCKET, (points.at(-1)?.at ?? 0) - first);
  const x = (at) => EDGE + ((at - first) / span) * (WIDTH - 2 * EDGE);
  const y = (value) => HEIGHT - EDGE - ((value - low) / (high - low)) * (HEIGHT - 2 * EDGE);
  put(line, { points: points.map((p) => `${x(p.at).toFixed(1)},${y(p.value).toFixed(1)}`).join(" ") });
  put(mark, perfect === undefined ? { visibility: "hidden" } : { y1: y(perfect), y2: y(perfect) });
  const last = points.length > 1 ? points.at(-1) : null; // one point is no course
  put(dot, last ? { d: `M${x(last.at)} ${y(last.value)}h0` } : { d: null });
  put(chart, { "aria-label": `${name}: ${inWords(points, written)}` });
}

function inWords(points, written) {
  if (points.length === 0) return "nothing in the last half hour";
  const all = points.map((p) => p.value);
  return (
    `between ${written(Math.min(...all))} and ${written(Math.max(...all))} ` +
    `in the last half hour, now ${written(all.at(-1))}`
  );
}

/** The tile that divides all prompt tokens into reused, computed, computed again and idle. */
function divisionTile() {
  const value = el("p", { class: "value" });
  const bar = shareBar();
  const terms = { reused: "reused", fresh: "computed", repeated: "again", idle: "idle" };
  const figures = Object.fromEntries(
    Object.entries(terms).map(([key, name]) => [key, { term: el("dt", { say: name, class: key }), is: el("dd") }]),
  );
  const list = el("dl", { class: "division" });
  for (const { term, is } of Object.values(figures)) list.append(el("div", {}, term, is));
  const node = el("div", { class: "card figure" }, el("h3", { say: "Prompt tokens" }), value, bar, list);
  return {
    node,
    show(totals) {
      const again = Math.min(totals.repeated, totals.computed);
      say(value, tokens(totals.prompt_tokens));
      showShares(bar, totals);
      say(figures.reused.is, tokens(totals.reused));
      say(figures.fresh.is, tokens(totals.computed - again));
      say(figures.repeated.is, tokens(again));
      say(figures.idle.is, tokens(totals.idle));
    },
  };
}
