/** Where the time of a request went: a bar of its stages, and the stage that took most of it. */

import { el, part, put } from "./dom.js";
import { seconds } from "./format.js";

/** The API's stages in their order, with their names. */
const STAGES = {
  read: "reading",
  engine: "waiting for an engine",
  swap: "waiting for its model",
  queue: "queue",
  prepare: "preparing",
  restore: "restore",
  prefill: "prefill",
  answer: "answer",
};
const TINY = 0.01; // seconds: shorter stages are not named

/** @param {Record<string, number>} stages seconds @returns {[string, number][]} names and times, longest first */
export function longest(stages) {
  return Object.entries(STAGES)
    .filter(([stage]) => stage !== "answer" && (stages[stage] ?? 0) >= TINY)
    .map(([stage, name]) => [name, stages[stage]])
    .sort(([, one], [, other]) => other - one);
}

/** Make a horizontal bar with a piece for each stage. */
export function stageBar() {
  return el("span", { class: "stages", role: "img" }, ...Object.keys(STAGES).map((stage) => el("span", { "data-stage": stage })));
}

/** Show a request's stages in such a bar, `whole` seconds wide; without it the request fills the bar. */
export function showStages(bar, stages = {}, whole = undefined) {
  const all = whole ?? Object.values(stages).reduce((sum, time) => sum + time, 0);
  const text = Object.entries(STAGES)
    .filter(([stage]) => (stages[stage] ?? 0) >= TINY)
    .map(([stage, name]) => `${name} ${seconds(stages[stage])}`)
    .join(", ");
  put(bar, { "aria-label": text || "no time yet", title: text });
  for (const piece of bar.children) part(piece, all > 0 ? (stages[piece.dataset.stage] ?? 0) / all : 0);
}
