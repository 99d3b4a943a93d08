/** Where the time of a request went: a bar of its stages. */

import { el, part, put } from "./dom.js";

/** The API's stages in their order. */
const STAGES = ["read", "engine", "swap", "queue", "prepare", "restore", "prefill", "answer"];

/** Make a horizontal bar with a piece for each stage. */
export function stageBar() {
  return el("span", { class: "stages", role: "img" }, ...STAGES.map((stage) => el("span", { "data-stage": stage })));
}

/** Show stages of a request in such a bar, `whole` seconds wide; without it the request fills the bar. */
export function showStages(bar, { stages, stages_text: text }, whole = undefined) {
  const all = whole ?? Object.values(stages).reduce((sum, time) => sum + time, 0);
  put(bar, { "aria-label": text || "no time yet", title: text });
  for (const piece of bar.children) part(piece, all > 0 ? (stages[piece.dataset.stage] ?? 0) / all : 0);
}
