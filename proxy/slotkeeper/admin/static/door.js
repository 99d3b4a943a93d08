/** The dialog that asks for the admin token, if the sidecar wants one. */

import { hasToken, keepToken } from "./connection.js";
import { byId, say } from "./dom.js";

/** @param {() => void} given called when the user has entered a token @returns {() => void} opens the dialog */
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
  dialog.addEventListener("cancel", (event) => event.preventDefault()); // without a token the page has nothing to show
  return () => {
    say(wrong, hasToken() ? "That token was refused." : "");
    keepToken(null);
    if (!dialog.open) dialog.showModal();
    token.focus();
  };
}
