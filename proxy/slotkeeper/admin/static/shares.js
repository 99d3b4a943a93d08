/** How a prompt divides: reused, computed, and of the latter what had been computed before. */

import { el, part, put } from "./dom.js";
import { exact, percent } from "./format.js";

export const FEW = 16; // repeated tokens that nobody has to ask about

/**
 * @param {{prompt_tokens: ?number, reused: ?number, computed: ?number, repeated: number}} counts
 * @returns {{reused: number, computed: number, repeated: number}|null} parts of 1, or nothing known yet
 */
export function shares({ prompt_tokens: all, reused, computed, repeated }) {
  if (!all || reused == null || computed == null) return null;
  const again = Math.min(repeated, computed);
  return { reused: reused / all, computed: (computed - again) / all, repeated: again / all };
}

/** @param {{prompt_tokens: ?number, reused: ?number, computed: ?number, repeated: number}} counts */
export function told(counts) {
  if (counts.prompt_tokens == null || counts.reused == null) return "no count yet";
  const again = counts.repeated > FEW ? `, ${exact(counts.repeated)} of them again` : "";
  return (
    `${exact(counts.prompt_tokens)} tokens: ${exact(counts.reused)} reused, ` +
    `${exact(counts.computed)} computed${again}`
  );
}

/** A horizontal bar in three parts. */
export function shareBar() {
  const kinds = ["reused", "computed", "repeated"];
  return el("span", { class: "shares", role: "img" }, ...kinds.map((kind) => el("span", { class: kind })));
}

/** Show other counts in it. */
export function showShares(bar, counts) {
  const found = shares(counts);
  put(bar, { "aria-label": told(counts), title: told(counts) });
  for (const piece of bar.children) part(piece, found?.[piece.className] ?? 0);
}

/** @returns {string} the hit rate: 93.4 % */
export function hitRate({ reused, prompt_tokens: all }) {
  return percent(all && reused != null ? reused / all : null);
}

/** A term and what it is, for lists of figures. */
export function pair(term, value, explained) {
  return el("div", { title: explained }, el("dt", { say: term }), el("dd", { say: value }));
}
