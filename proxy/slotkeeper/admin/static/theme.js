/** The reader's choice of a light or dark theme; the default is the system's. */

import { say } from "./dom.js";

const KEY = "slotkeeper-theme";
const CHOICES = ["auto", "light", "dark"];

/** @param {HTMLButtonElement} button each click selects the next choice */
export function theme(button) {
  let chosen = localStorage.getItem(KEY);
  if (!CHOICES.includes(chosen)) chosen = CHOICES[0];

  function show() {
    document.documentElement.dataset.theme = chosen;
    say(button, `Theme: ${chosen}`);
  }

  button.addEventListener("click", () => {
    chosen = CHOICES[(CHOICES.indexOf(chosen) + 1) % CHOICES.length];
    localStorage.setItem(KEY, chosen);
    show();
  });
  show();
}
