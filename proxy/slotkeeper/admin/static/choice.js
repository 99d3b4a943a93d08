/** The decision: the slot that a request went to, and the plans that were worse. */

import { el } from "./dom.js";
import { exact, NONE, seconds, words } from "./format.js";

/** @param {object} request @returns {Element|null} */
export function choice({ choice: made }) {
  if (made === null) return null;
  const held =
    made.common_tokens == null
      ? `${exact(made.held_tokens)} tokens were held there.`
      : `${exact(made.common_tokens)} of the ${exact(made.held_tokens)} tokens held there are the prompt's first.`;
  const options = [made.chosen, ...made.beaten];
  return el(
    "section",
    { "aria-labelledby": "choice-title" },
    el("h3", { id: "choice-title", say: "Where it went" }),
    el("p", { class: "quiet", say: held }),
    el(
      "div",
      { class: "scrolls", role: "group", "aria-labelledby": "choice-title", tabindex: 0 },
      el(
        "table",
        { class: "options", "aria-labelledby": "choice-title" },
        el("thead", {}, head()),
        el("tbody", {}, ...options.map((option, index) => row(option, index === 0, made.chosen))),
      ),
    ),
  );
}

function head() {
  const column = (name, number) => el("th", { scope: "col", say: name, class: number ? "number" : null });
  return el(
    "tr",
    {},
    column("Place"),
    column("Because"),
    column("First"),
    column("Reuses", true),
    column("Price in tokens", true),
    column("Time", true),
  );
}

function row(option, chosen, best) {
  const place = option.slot == null ? "the engine's choice" : `slot ${option.slot}`;
  const far = option.engine === best.engine ? "" : ` of ${option.engine.replace(/^https?:\/\//, "")}`;
  const name = el("th", { scope: "row", say: place + far });
  if (chosen) name.append(" ", el("span", { class: "chosen", say: "taken" }));
  return el(
    "tr",
    { "data-chosen": chosen ? "" : null },
    name,
    el("td", { say: words(option.decision) }),
    el("td", { say: option.steps.map(words).join(", ") || NONE }),
    el("td", { class: "number", say: exact(option.reuse_tokens) }),
    el("td", { class: "number", say: exact(Math.round(option.price_tokens)) }),
    el("td", { class: "number", say: seconds(option.price_seconds) }),
  );
}
