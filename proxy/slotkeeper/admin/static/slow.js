/** What is slow: the waits of the last requests, and the slowest five of them with the reason. */

import { byId, el, keyed, say } from "./dom.js";
import { conversation, NONE, seconds } from "./format.js";
import { showStages, stageBar } from "./stages.js";

const SHOWN = 5;

/** @param {Element} list inside a card @returns {(waits: object, requests: object[], now: number) => void} `now` in ms */
export function slow(list) {
  const card = list.closest(".card");
  return (waits, requests, now) => {
    const timed = requests.map((request) => ({ request, wait: request.to_first_token_seconds })).filter(({ wait }) => wait > 0);
    timed.sort((one, other) => other.wait - one.wait);
    card.hidden = timed.length === 0;
    const { answers, first_token_p50: middle, first_token_p95: late, stall_seconds: stall } = waits;
    say(byId("first-token"), middle == null ? NONE : seconds(middle));
    const stalled = stall == null ? "" : `; longest stall ${seconds(stall)}`;
    say(byId("first-token-note"), `median of the last ${answers}; 95 % within ${seconds(late)}${stalled}`);
    say(byId("first-token-least"), least(waits));
    const slowest = timed.slice(0, SHOWN);
    const whole = slowest[0]?.wait;
    keyed(list, slowest, ({ request }) => `${request.id} ${request.came}`, make, (node, each) => show(node, each, whole, now));
  };
}

/** Return what requests waited in all, beside the least; one whose least is unknown is in neither sum. */
function least({ answers, waited_seconds: waited, compared, compared_seconds: those, least_seconds: least }) {
  if (!compared) return `waited ${seconds(waited)}; with a perfect cache: unknown`;
  const of = compared < answers ? ` (${compared} of ${answers})` : "";
  return `waited ${seconds(those)}, with a perfect cache at least ${seconds(least)} by the engine's speed${of}`;
}

function make({ request }) {
  const link = el("a", { href: `#request=${encodeURIComponent(request.id)}` });
  return el("li", {}, el("p", { class: "line" }, link, el("span")), stageBar(), el("p", { class: "quiet" }));
}

function show(node, { request, wait }, whole, now) {
  const [head, bar, foot] = node.children;
  const [link, time] = head.children;
  const { answer, ...stages } = request.stages; // the bar ends at the first token
  say(link, conversation(request, now));
  say(time, request.first_token_seconds == null ? `${seconds(wait)} so far` : seconds(wait));
  showStages(bar, { ...request, stages }, whole);
  say(foot, [request.now?.text, request.stages_text].filter(Boolean).join(" · "));
}
