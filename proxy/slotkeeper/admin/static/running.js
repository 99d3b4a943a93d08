/** Running requests: their place in the queue, or how much of their prompt is computed. */

import { el, keyed, part, put, say } from "./dom.js";
import { conversation, seconds } from "./format.js";
import { showStages, stageBar } from "./stages.js";

/** @param {Element} list inside a card @returns {(running: object[], now: number) => void} `now` in ms */
export function running(list) {
  const card = list.closest(".card");
  return (found, now) => {
    card.hidden = found.length === 0;
    keyed(list, found, (request) => `${request.id} ${request.came}`, make, (node, request) => show(node, request, now));
  };
}

function make(request) {
  const link = el("a", { href: `#request=${encodeURIComponent(request.id)}` });
  const bar = el("div", { class: "gauge", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100 });
  bar.append(el("span", { class: "fill" }));
  return el("li", {}, el("p", { class: "line" }, link, el("span")), bar, stageBar(), el("p", { class: "quiet" }));
}

function show(node, request, now) {
  const [head, bar, stages, foot] = node.children;
  const [link, what] = head.children;
  const name = conversation(request, now);
  say(link, name);
  say(what, request.now.text);
  const done = request.now.percent;
  bar.hidden = done == null;
  part(bar.firstElementChild, (done ?? 0) / 100);
  put(bar, { "aria-label": `Prefill of ${name}`, "aria-valuenow": done, "aria-valuetext": request.now.text });
  showStages(stages, request);
  const where = request.slot == null ? null : `slot ${request.slot}`;
  say(foot, [request.model, where, `since ${seconds(request.seconds)}`].filter(Boolean).join(" · "));
}
