/** Where a prompt diverges from the previous prompt of its conversation, and what was changed in the request. */

import { el } from "./dom.js";
import { exact, seconds, words } from "./format.js";
import { pair } from "./shares.js";

const NO_TEXT = "The text is not kept. With --why-text it is, in memory only.";

/** @param {object} request @returns {(Element|null)[]} */
export function parting({ parting: report, changes }) {
  return [report && where(report), changes.length ? changed(changes) : null];
}

function where(report) {
  const terms = [
    ["first token that differs", exact(report.token), "counted from 0"],
    ["where", report.where],
    ["cause", words(report.cause)],
    ["computed again", exact(report.repeated_tokens), "tokens behind it that had not changed"],
    ["that took", seconds(report.seconds)],
    ["rule", report.rule ? `${words(report.rule)}, ${report.fixed ? "fixed it" : "only observes"}` : "none"],
  ];
  return el(
    "section",
    { "aria-labelledby": "parting-title" },
    el("h3", { id: "parting-title", say: "Where it parts from the one before" }),
    el("dl", { class: "pairs" }, ...terms.map((term) => pair(...term))),
    report.text ? surroundings(report.text) : el("p", { class: "quiet", say: NO_TEXT }),
  );
}

/** Both texts begin at the first token that differs. Their common end did not change, so it is not marked. */
function surroundings({ lead, was, now }) {
  const [before, after] = [[...was], [...now]];
  let alike = 0;
  while (alike < Math.min(before.length, after.length) && before.at(-1 - alike) === after.at(-1 - alike)) alike += 1;
  const side = (name, tag, letters) => {
    const at = letters.length - alike;
    const changed = el(tag, { say: letters.slice(0, at).join("") });
    return el("div", {}, el("dt", { say: name }), el("dd", {}, lead, changed, letters.slice(at).join("")));
  };
  return el("dl", { class: "texts" }, side("was", "del", before), side("now", "ins", after));
}

function changed(changes) {
  return el(
    "section",
    { "aria-labelledby": "changes-title" },
    el("h3", { id: "changes-title", say: "What its client had changed" }),
    el("ul", { class: "changes" }, ...changes.map(change)),
  );
}

function change({ rule, mode, declined, path, before, after }) {
  const title = `${rule ? words(rule) : "repeated"} (${words(declined ? "declined" : mode)}) `;
  const node = el("li", {}, el("p", {}, title, el("code", { say: path })));
  if (before || after) {
    const side = (name, tag, text) => el("div", {}, el("dt", { say: name }), el("dd", {}, el(tag, { say: text })));
    node.append(el("dl", { class: "texts" }, side("before", "del", before), side("after", "ins", after)));
  }
  return node;
}
