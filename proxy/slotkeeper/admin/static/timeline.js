/** The stages of a request over time, as a table whose last column is a chart. */

import { el } from "./dom.js";
import { exact, NONE, seconds, words } from "./format.js";

/** Colours of stages; every other stage is shown as time that passes. */
const COLOURS = { prefill: "computed", plant: "computed", restore: "reused", save: "kept", generate: "generated" };

/** @param {object} request @returns {Element|null} */
export function timeline({ timeline: spans }) {
  if (spans.length === 0) return null;
  const whole = Math.max(...spans.map((span) => span.end), 1e-6);
  return el(
    "section",
    { "aria-labelledby": "timeline-title" },
    el("h3", { id: "timeline-title", say: "Timeline" }),
    el(
      "table",
      { class: "gantt", "aria-labelledby": "timeline-title" },
      el("thead", {}, head()),
      el("tbody", {}, ...spans.map((span) => row(span, whole))),
    ),
  );
}

function head() {
  const names = ["Stage", "Tokens", "Took", "When"];
  return el("tr", {}, ...names.map((name) => el("th", { scope: "col", say: name, class: name.toLowerCase() })));
}

function row(span, whole) {
  const bar = el("span", { class: `bar ${COLOURS[span.stage] ?? "passing"}` });
  bar.style.setProperty("--begin", (Math.max(0, span.begin) / whole).toFixed(4));
  bar.style.setProperty("--part", (Math.max(0, span.end - span.begin) / whole).toFixed(4));
  const when = `from ${seconds(span.begin)} to ${seconds(span.end)}`;
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, span.stage, " ", el("span", { class: "quiet", say: words(span.note || "") })),
    el("td", { class: "number", say: span.tokens == null ? NONE : exact(span.tokens) }),
    el("td", { class: "number", say: seconds(span.end - span.begin) }),
    el("td", { class: "track", title: when }, bar, el("span", { class: "unseen", say: when })),
  );
}
