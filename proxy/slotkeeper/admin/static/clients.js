/** The table of clients: requests, tokens and waiting time saved for each. */

import { el, keyed, say } from "./dom.js";
import { age, exact, timeSaved } from "./format.js";
import { shareBar, showShares } from "./shares.js";

/** @param {Element} body the body of a table inside a card @returns {(clients: object[]) => void} */
export function clients(body) {
  const card = body.closest(".card");
  return (found) => {
    card.hidden = found.length === 0;
    keyed(body, found, ({ agent, key }) => `${agent} ${key}`, make, show);
  };
}

function make() {
  const number = (name) => el("td", { "data-name": name, class: "number" });
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, el("span"), " ", el("code", { class: "quiet" })),
    number("Requests"),
    number("Prompt"),
    el("td", { "data-name": "Reused and computed" }, shareBar()),
    number("Reused"),
    number("Computed"),
    number("Waiting saved"),
    el("td", { "data-name": "Last" }),
  );
}

function show(row, client) {
  const [name, count, prompt, bar, reused, computed, saved, last] = row.children;
  say(name.firstElementChild, client.agent);
  say(name.lastElementChild, client.key);
  say(count, exact(client.requests));
  say(prompt, exact(client.prompt_tokens));
  showShares(bar.firstElementChild, { ...client, repeated: 0 });
  say(reused, exact(client.reused));
  say(computed, exact(client.computed));
  say(saved, timeSaved(client));
  say(last, age(client.idle_seconds));
}
