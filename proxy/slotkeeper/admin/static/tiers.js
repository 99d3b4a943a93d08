/** Snapshots by tier: their number, and how much of the budget their files take. */

import { byId, el, keyed, part, put, say } from "./dom.js";
import { bytes, plural } from "./format.js";

/** @param {Element} parent @returns {(tiers: object[]) => void} */
export function tiers(parent) {
  return (all) => {
    const used = all.filter((tier) => tier.snapshots || tier.budget_bytes); // a second tier is optional
    byId("tiers-empty").hidden = used.length > 0;
    keyed(parent, used, (tier) => tier.tier, make, show);
  };
}

function make() {
  const gauge = el("div", { class: "gauge", role: "meter", "aria-valuemin": 0 }, el("span", { class: "fill" }));
  return el("li", {}, el("p", { class: "line" }, el("strong"), el("span")), gauge, el("p", { class: "quiet" }));
}

function show(node, { tier, snapshots, bytes: size, budget_bytes: budget, advice }) {
  const [head, gauge, foot] = node.children;
  say(head.firstElementChild, tier);
  say(head.lastElementChild, plural(snapshots, "snapshot"));
  part(gauge.firstElementChild, budget ? size / budget : 0);
  put(gauge, {
    "aria-label": `Bytes in the ${tier} tier`,
    "aria-valuenow": budget ? Math.min(size, budget) : size,
    "aria-valuemax": budget ?? size,
    "aria-valuetext": budget ? `${bytes(size)} of ${bytes(budget)}` : bytes(size),
  });
  const room = budget ? `${bytes(size)} of ${bytes(budget)}` : `${bytes(size)}, no budget`;
  say(foot, [room, advice].filter(Boolean).join(". "));
}
