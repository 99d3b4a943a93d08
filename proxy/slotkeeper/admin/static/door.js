/** Asking for the admin token, where the sidecar wants one. */

import { hasToken, keepToken } from "./connection.js";
import { byId, say } from "./dom.js";

/** @param {() => void} given called when there is a token to try @returns {() => void} opens it */
export function door(given) {
  const dialog = byId("door");
  const token = byId("token");
  const wrong = byId("door-wrong");

  byId("door-form").addEventListener("submit", (event) => {
    event.preventDefault();
    keepToken(token.value);
    token.value = "";
    dialog.close();
    given();
  });
  dialog.addEventListener("cancel", (event) => event.preventDefault()); // there is nothing behind it
  return () => {
    say(wrong, hasToken() ? "That token was refused." : "");
    keepToken(null);
    if (!dialog.open) dialog.showModal();
    token.focus();
  };
}
