/** Engines that do not answer, above all else. */

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
    const found = down.map((engine) => ({ key: engine.engine, text: told(engine) }));
    if (down.length > 0 && down.length === engines.length) {
      found.push({ key: "", text: "No engine is up: requests fail until one is." });
    }
    keyed(list, found, ({ key }) => key, () => el("li"), (node, { text }) => say(node, text));
  };
}

function told({ engine, health, down_seconds: since }) {
  const state = STATES[health] ?? `cannot be probed (${health}): the log says why`;
  return `${engine} ${state}${since == null ? "" : `, for ${span(since)}`}`;
}
