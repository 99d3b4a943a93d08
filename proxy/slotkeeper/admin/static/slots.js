/** The engines and their slots: which conversation each slot holds, and how full it is. */

import { el, keyed, part, put, say } from "./dom.js";
import { age, conversation, exact, plural, tokens, words } from "./format.js";

// How the states of an engine are marked; every other state is marked as down.
// The colours of an engine's dot are those of `slotkeeper top`; all other states look down.
const LOOKS = { up: "up", unloaded: "idle", sleeping: "idle" };
for (const state of ["silent", "draining", "drained", "awaited", "loading", "probing"]) LOOKS[state] = "passing";

/** @param {Element} parent @returns {(engines: object[]) => void} */
export function slots(parent) {
  return (engines) => keyed(parent, engines, (engine) => engine.engine, makeEngine, showEngine);
}

function makeEngine() {
  return el(
    "li",
    { class: "engine" },
    el("h3", {}, el("span", { class: "state" }), el("span", { class: "address" })),
    el("p", { class: "quiet" }),
    el("div", { class: "gauge pool", role: "meter", "aria-valuemin": 0, hidden: "" }, el("span", { class: "fill" })),
    el("ul", { class: "slots" }),
  );
}

function showEngine(node, engine) {
  const [title, facts, pool, list] = node.children;
  const [state, address] = title.children;
  put(state, { "data-state": LOOKS[engine.state] ?? "down", title: engine.state_text });
  say(state, words(engine.state));
  say(address, engine.engine.replace(/^https?:\/\//, ""));
  const speed = engine.prefill_tokens_per_second;
  const kept = engine.ram_cache_entries_tokens.length;
  say(
    facts,
    [
      engine.build,
      engine.up ? `${words(engine.memory)} memory` : null,
      engine.context_tokens && !engine.pool ? `${tokens(engine.context_tokens)} tokens each` : null,
      engine.pool ? `${tokens(engine.pool.taken)} of ${tokens(engine.pool.cells)} cells of one KV buffer taken` : null,
      speed ? `prefill ${tokens(Math.round(speed))} tokens/s` : null,
      kept ? `${plural(kept, "prompt")} in its RAM cache` : null,
      ...Object.entries(engine.labels).map(([label, value]) => `${label} ${value}`),
    ]
      .filter(Boolean)
      .join(" · "),
  );
  showPool(pool, engine.pool);
  keyed(list, engine.up ? engine.slots : [], (slot) => slot.slot, makeSlot, (item, slot) => showSlot(item, slot, engine));
}

/** Show how many cells of a shared KV buffer are taken by its slots or promised to them. */
function showPool(gauge, pool) {
  gauge.hidden = !pool;
  if (!pool) return;
  part(gauge.firstElementChild, pool.taken / pool.cells);
  put(gauge, {
    "aria-label": "Shared KV buffer: cells taken or promised",
    "aria-valuemax": pool.cells,
    "aria-valuenow": Math.min(pool.taken, pool.cells),
  });
}

function makeSlot() {
  const gauge = el("div", { class: "gauge", role: "meter", "aria-valuemin": 0 }, el("span", { class: "fill" }));
  gauge.append(el("span", { class: "ticks" }));
  return el(
    "li",
    { class: "slot" },
    el("p", { class: "line" }, el("strong"), el("span", { class: "state" }), el("span", { class: "holds" })),
    gauge,
    el("p", { class: "quiet line" }, el("span"), el("span"), el("a", { hidden: "" })),
  );
}

function showSlot(node, slot, engine) {
  const [head, gauge, foot] = node.children;
  const [name, state, holds] = head.children;
  say(name, `Slot ${slot.slot}`);
  say(state, slot.state);
  put(state, { "data-state": slot.state });
  say(holds, slot.held_tokens || slot.request ? conversation(slot) : "empty");
  showGauge(gauge, slot, engine.context_tokens);
  const [amount, marks, link] = foot.children;
  say(amount, `${exact(slot.held_tokens)} of ${tokens(engine.context_tokens)}`);
  say(marks, details(slot));
  showLink(link, slot);
}

/** Show the link to the explanation of the last request in this slot. */
function showLink(link, { slot, request, idle_seconds: idle }) {
  link.hidden = !request;
  if (!request) return;
  const when = idle == null ? "at work" : age(idle);
  put(link, {
    href: `#request=${encodeURIComponent(request)}`,
    "aria-label": `Why: last request of slot ${slot}, ${when}`,
  });
  say(link, when);
}

function details(slot) {
  const marks = slot.checkpoints.length ? plural(slot.checkpoints.length, "checkpoint") : null;
  return [marks, slot.saved ? "saved" : null].filter(Boolean).join(" · ");
}

function showGauge(gauge, slot, room) {
  const [fill, ticks] = gauge.children;
  part(fill, slot.held_tokens / room);
  put(gauge, {
    "aria-label": `Slot ${slot.slot}: tokens held`,
    "aria-valuemax": room,
    "aria-valuenow": Math.min(slot.held_tokens, room),
    "data-saved": slot.saved ? "" : null,
  });
  const places = [...new Set(slot.checkpoints)];
  keyed(ticks, places, (at) => at, () => el("i"), (tick, at) => part(tick, at / room));
}
