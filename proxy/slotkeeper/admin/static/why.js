/** The explanation of one request, in a dialog with its own address: `#request=ID`. */

import { ask, Missing, serverNow } from "./connection.js";
import { byId, el, say } from "./dom.js";
import { conversation, exact, seconds, time, words } from "./format.js";
import { choice } from "./choice.js";
import { parting } from "./parting.js";
import { pair, shareBar, showShares } from "./shares.js";
import { timeline } from "./timeline.js";

const PREFIX = "#request=";
const HOME = "./";

/** @returns {() => Promise<void>} fetches the request again, until it has ended */
export function why() {
  const dialog = byId("why");
  const body = byId("why-body");
  let shown = null; // the request's document, as fetched last
  let opener = null;

  async function look() {
    const id = wanted();
    if (id === null) return;
    try {
      shown = await ask(`/api/requests/${encodeURIComponent(id)}`);
    } catch (error) {
      if (!(error instanceof Missing)) throw error;
      shown = { id, missing: true };
    }
    if (wanted() === id) fill(body, shown);
  }

  function follow() {
    if (wanted() === null) {
      dialog.close();
      return;
    }
    if (!dialog.open) {
      opener = document.activeElement;
      dialog.showModal();
    }
    body.replaceChildren(el("p", { class: "quiet", say: "Loading" }));
    say(byId("why-title"), "Request");
    look().catch(() => {}); // the page's next poll shows the error
  }

  dialog.addEventListener("close", () => {
    shown = null;
    if (wanted() !== null) history.replaceState(null, "", HOME);
    if (opener?.isConnected) opener.focus();
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close(); // a click on the backdrop
  });
  byId("why-close").addEventListener("click", () => dialog.close());
  window.addEventListener("hashchange", follow);
  follow();
  return async () => {
    if (dialog.open && (shown === null || shown.outcome === "running")) await look();
  };
}

function wanted() {
  if (!location.hash.startsWith(PREFIX)) return null;
  try {
    return decodeURIComponent(location.hash.slice(PREFIX.length)) || null;
  } catch {
    return null; // a broken link
  }
}

function fill(body, request) {
  if (request.missing) {
    say(byId("why-title"), "Request");
    body.replaceChildren(el("p", { say: "This request is not among the last requests any more." }));
    return;
  }
  say(byId("why-title"), request.verdict || words(request.outcome));
  const inside = [account(request), figures(request), timeline(request), choice(request)];
  body.replaceChildren(...[...inside, ...parting(request)].filter(Boolean));
}

function account(request) {
  const facts = [
    conversation(request, serverNow()),
    request.model,
    time(request.came),
    words(request.kind),
    request.route,
    request.id,
  ].filter(Boolean);
  const sentences = request.explanation.map((sentence) => el("li", { say: sentence }));
  return el(
    "section",
    { "aria-label": "In words" },
    el("p", { class: "quiet facts", say: facts.join(" · ") }),
    el("ul", { class: "sentences" }, ...sentences),
  );
}

function figures(request) {
  const bar = shareBar();
  showShares(bar, request);
  const terms = [
    ["prompt", exact(request.prompt_tokens), "tokens, by the engine's count"],
    ["reused", exact(request.reused), "tokens that earlier work had left"],
    ["prepared", exact(request.prepared), "of these, computed in idle time"],
    ["computed", exact(request.computed), "tokens that the request waited for"],
    ["planted", exact(request.planted), "of these, computed by Slotkeeper's own prefills before the request was sent"],
    ["least possible", exact(request.oracle), "what a perfect cache would have computed"],
    ["computed again", exact(request.repeated), "tokens that had been computed before"],
    ["first token", seconds(request.first_token_seconds), "since it arrived"],
    ["longest stall", seconds(request.stall_seconds), "between two tokens of its answer"],
    ["in all", seconds(request.seconds), "since it arrived"],
    ["saved", seconds(request.saved_seconds), "against computing the reused tokens, less what the steps before it took"],
  ];
  return el("section", { "aria-label": "Figures" }, bar, el("dl", { class: "pairs" }, ...terms.map((t) => pair(...t))));
}
