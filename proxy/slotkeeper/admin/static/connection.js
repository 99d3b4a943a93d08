/** Asking the admin port: with a token where one is wanted, again and again, through restarts. */

const TOKEN = "slotkeeper-token";
const SEEN_MS = 1000; // between two looks
const HIDDEN_MS = 10_000; // while nobody sees the page
const LOST_MS = 2000;
const TIMEOUT_MS = 8000;

export class Unauthorized extends Error {}
export class Missing extends Error {}

/** @param {string|null} value kept until the tab is closed; null forgets it */
export function keepToken(value) {
  if (value === null) sessionStorage.removeItem(TOKEN);
  else sessionStorage.setItem(TOKEN, value);
}

export const hasToken = () => sessionStorage.getItem(TOKEN) !== null;

let skew = 0; // of the server's clock against ours, in ms

/** The server's clock in ms: what `came` is told by. */
export const serverNow = () => Date.now() + skew;

/**
 * One document of the API.
 * @param {string} path
 * @throws {Unauthorized|Missing|Error}
 */
export async function ask(path) {
  const token = sessionStorage.getItem(TOKEN);
  const answer = await fetch(path, {
    headers: token === null ? {} : { Authorization: `Bearer ${token}` },
    cache: "no-store",
    credentials: "omit",
    signal: AbortSignal.timeout(TIMEOUT_MS),
  });
  follow(answer.headers.get("Date"));
  if (answer.status === 401) throw new Unauthorized();
  if (answer.status === 404) throw new Missing();
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

/** The header has whole seconds, so only a larger difference means that clocks disagree. */
function follow(date) {
  const found = date === null ? NaN : Date.parse(date) - Date.now();
  if (Math.abs(found - skew) > 2000) skew = Math.abs(found) > 2000 ? found : 0;
}

/**
 * Look about once a second, more seldom while the page is hidden, never twice at a time.
 * @param {() => Promise<void>} look
 * @param {(error: Error|null) => void} told after each look, with what went wrong
 * @returns {() => void} looks at once, also after a look that failed
 */
export function poll(look, told) {
  let timer;
  let looking = false;

  async function turn() {
    if (looking) return;
    looking = true;
    clearTimeout(timer);
    let failed = null;
    try {
      await look();
    } catch (error) {
      failed = error;
    }
    looking = false;
    told(failed);
    if (failed instanceof Unauthorized) return; // until somebody gives a token
    timer = setTimeout(turn, document.hidden ? HIDDEN_MS : failed ? LOST_MS : SEEN_MS);
  }

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) turn();
  });
  turn();
  return turn;
}
