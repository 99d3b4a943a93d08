/** Alarms at the top of the page: engines that are not up, and what happens to requests meanwhile. */

import { el, keyed, put, say } from "./dom.js";
import { span } from "./format.js";

// States that need no alarm: the slots' card shows them.
const QUIET = new Set(["up", "unloaded", "draining", "drained"]);
// States that end by themselves, or with the next request.
const PASSING = new Set(["loading", "sleeping", "awaited", "probing", "wakes", "waits"]);

/** @param {Element} list @returns {(state: object) => void} */
export function alarms(list) {
  return ({ engines, service }) => {
    const lines = engines
      .filter(({ state }) => !QUIET.has(state))
      .map((engine) => ({ key: engine.engine, state: engine.state, text: describe(engine) }));
    if (service.text) lines.push({ key: "", state: service.state, text: service.text });
    put(list, { "data-passing": lines.every(({ state }) => PASSING.has(state)) });
    keyed(list, lines, ({ key }) => key, () => el("li"), (node, { text }) => say(node, text));
  };
}

function describe({ engine, state_text: text, down_seconds: since }) {
  return `${engine} ${text}${since == null ? "" : `, for ${span(since)}`}`;
}
