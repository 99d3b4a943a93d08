/** The table of recent requests. */

import { byId, el, keyed, put, say } from "./dom.js";
import { conversation, exact, seconds, time, words } from "./format.js";
import { FEW, shareBar, showShares } from "./shares.js";
import { showStages, stageBar } from "./stages.js";

const ROWS = 25;

/** @param {Element} body @returns {(requests: object[], now: number) => void} newest first; `now` in ms */
export function requests(body) {
  const only = byId("only-repeated");
  let last = [];
  let clock = 0;

  function draw() {
    const wanted = only.checked ? last.filter((request) => request.repeated > FEW) : last;
    byId("requests-empty").hidden = wanted.length > 0;
    keyed(body, wanted.slice(0, ROWS), (request) => `${request.id} ${request.came}`, make, (row, request) => show(row, request, clock));
  }

  only.addEventListener("change", draw);
  return (found, now) => {
    [last, clock] = [found, now];
    draw();
  };
}

function make(request) {
  const link = el("a", { href: `#request=${encodeURIComponent(request.id)}`, say: time(request.came) });
  const cell = (name, ...inside) => el("td", { "data-name": name }, ...inside);
  const number = (name) => el("td", { "data-name": name, class: "number" });
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, link),
    cell("Conversation", el("span", { class: "short" })),
    cell("Kind"),
    cell("Slot"),
    number("Prompt"),
    cell("Reused and computed", shareBar()),
    number("Computed"),
    number("First token"),
    cell("Time", stageBar()),
    cell("Why"),
  );
}

function show(row, request, clock) {
  const [, name, kind, slot, prompt, bar, computed, first, stages, why] = row.children;
  const running = request.outcome === "running";
  put(row, { "data-running": running ? "" : null, "data-repeated": request.repeated > FEW ? "" : null });
  const called = conversation(request, clock);
  say(name.firstElementChild, called);
  put(name.firstElementChild, { title: [called, request.model].filter(Boolean).join(" · ") });
  say(kind, words(request.kind));
  say(slot, placeOf(request));
  say(prompt, exact(request.prompt_tokens));
  showShares(bar.firstElementChild, request);
  say(computed, exact(request.computed));
  say(first, seconds(request.first_token_seconds));
  showStages(stages.firstElementChild, request);
  say(why, running ? (request.now?.text ?? "running") : ended(request));
}

function placeOf({ slot, decision }) {
  if (decision == null) return "waits";
  return slot == null ? words(decision) : `${slot} · ${words(decision)}`;
}

/** How a request ended. An error is shown rather than the verdict on what was computed. */
function ended({ outcome, status, verdict }) {
  if (status != null && status >= 400) return `${words(outcome)} (${status})`;
  return verdict || words(outcome);
}
