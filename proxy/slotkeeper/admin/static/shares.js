/** How a prompt divides: tokens reused, tokens computed, and of the latter those computed before. */

import { el, part, put } from "./dom.js";
import { exact, percent } from "./format.js";

export const FEW = 16; // repeated tokens that are too few to show

/**
 * @param {{prompt_tokens: ?number, reused: ?number, computed: ?number, repeated: number}} counts
 * @returns {{reused: number, computed: number, repeated: number}|null} parts of 1; null while they are not known
 */
export function shares({ prompt_tokens: all, reused, computed, repeated }) {
  if (!all || reused == null || computed == null) return null;
  const again = Math.min(repeated, computed);
  return { reused: reused / all, computed: (computed - again) / all, repeated: again / all };
}

/** @param {{prompt_tokens: ?number, reused: ?number, computed: ?number, repeated: number}} counts */
export function describeCounts(counts) {
  if (counts.prompt_tokens == null || counts.reused == null) return "no count yet";
  const again = counts.repeated > FEW ? `, ${exact(counts.repeated)} of them again` : "";
  return (
    `${exact(counts.prompt_tokens)} tokens: ${exact(counts.reused)} reused, ` +
    `${exact(counts.computed)} computed${again}`
  );
}

/** Make a horizontal bar in three parts. */
export function shareBar() {
  const kinds = ["reused", "computed", "repeated"];
  return el("span", { class: "shares", role: "img" }, ...kinds.map((kind) => el("span", { class: kind })));
}

/** Show other counts in such a bar. */
export function showShares(bar, counts) {
  const parts = shares(counts);
  put(bar, { "aria-label": describeCounts(counts), title: describeCounts(counts) });
  for (const piece of bar.children) part(piece, parts?.[piece.className] ?? 0);
}

/** @returns {string} the hit rate: 93.4 % */
export function hitRate({ reused, prompt_tokens: all }) {
  return percent(all && reused != null ? reused / all : null);
}

/** Make a term and its value, for lists of figures. */
export function pair(term, value, explained) {
  return el("div", { title: explained }, el("dt", { say: term }), el("dd", { say: value }));
}
