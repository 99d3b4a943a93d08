/** Alarms at the top of the page: engines that do not answer. */

import { el, keyed, say } from "./dom.js";
import { span } from "./format.js";

const STATES = {
  down: "does not answer",
  loading: "is loading its model",
  sleeping: "sleeps, and wakes with the next request",
};

/** @param {Element} list @returns {(engines: object[]) => void} */
export function alarms(list) {
  return (engines) => {
    const down = engines.filter((engine) => !engine.up && engine.health !== "unloaded");
    const lines = down.map((engine) => ({ key: engine.engine, text: describe(engine) }));
    if (down.length > 0 && down.length === engines.length) {
      lines.push({ key: "", text: "No engine is up: requests fail until one is." });
    }
    keyed(list, lines, ({ key }) => key, () => el("li"), (node, { text }) => say(node, text));
  };
}

function describe({ engine, health, down_seconds: since }) {
  const state = STATES[health] ?? `cannot be probed (${health}): the log says why`;
  return `${engine} ${state}${since == null ? "" : `, for ${span(since)}`}`;
}
