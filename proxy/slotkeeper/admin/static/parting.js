/** Where a prompt parts from the one before it, and what was changed in the request. */

import { el } from "./dom.js";
import { exact, seconds, words } from "./format.js";
import { pair } from "./shares.js";

const NO_TEXT = "Its words are not kept; --why-text keeps them, in memory only.";

/** @param {object} request @returns {(Element|null)[]} */
export function parting({ parting: found, changes }) {
  return [found && where(found), changes.length ? changed(changes) : null];
}

function where(found) {
  const terms = [
    ["first token that differs", exact(found.token), "counted from 0"],
    ["where", found.where],
    ["cause", words(found.cause)],
    ["computed again", exact(found.repeated_tokens), "tokens behind it that had not changed"],
    ["that took", seconds(found.seconds)],
    ["rule", found.rule ? `${words(found.rule)}, ${found.fixed ? "fixed it" : "only observes"}` : "none"],
  ];
  return el(
    "section",
    { "aria-labelledby": "parting-title" },
    el("h3", { id: "parting-title", say: "Where it parts from the one before" }),
    el("dl", { class: "pairs" }, ...terms.map((term) => pair(...term))),
    found.text ? surroundings(found.text) : el("p", { class: "quiet", say: NO_TEXT }),
  );
}

/** Both begin where the first token differs; what they end with alike did not change. */
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
  const title = `${rule ? words(rule) : "told again"} (${words(declined ? "declined" : mode)}) `;
  const node = el("li", {}, el("p", {}, title, el("code", { say: path })));
  if (before || after) {
    const side = (name, tag, text) => el("div", {}, el("dt", { say: name }), el("dd", {}, el(tag, { say: text })));
    node.append(el("dl", { class: "texts" }, side("before", "del", before), side("after", "ins", after)));
  }
  return node;
}
