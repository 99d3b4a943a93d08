/** Requests to the admin port: with a token where the sidecar wants one, and repeated, also over its restarts. */

const TOKEN = "slotkeeper-token";
const SEEN_MS = 1000; // between two polls while the page is visible
const HIDDEN_MS = 10_000; // while it is hidden
const LOST_MS = 2000; // after a poll that failed
const TIMEOUT_MS = 8000;

export class Unauthorized extends Error {}
export class Missing extends Error {}

/** @param {string|null} value the token, kept until the tab is closed; null removes it */
export function keepToken(value) {
  if (value === null) sessionStorage.removeItem(TOKEN);
  else sessionStorage.setItem(TOKEN, value);
}

export const hasToken = () => sessionStorage.getItem(TOKEN) !== null;

let skew = 0; // ms that the server's clock is ahead of the browser's

/** The server's clock in ms. The API's times, such as `came`, are on this clock. */
export const serverNow = () => Date.now() + skew;

/**
 * Fetch one document of the API.
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
  measureSkew(answer.headers.get("Date"));
  if (answer.status === 401) throw new Unauthorized();
  if (answer.status === 404) throw new Missing();
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

/** Correct `skew` by a Date header. It has whole seconds, so only a larger difference means that clocks disagree. */
function measureSkew(date) {
  const ahead = date === null ? NaN : Date.parse(date) - Date.now();
  if (Math.abs(ahead - skew) > 2000) skew = Math.abs(ahead) > 2000 ? ahead : 0;
}

/**
 * Poll about once a second, less often while the page is hidden. Polls never overlap.
 * @param {() => Promise<void>} look one poll
 * @param {(error: Error|null) => void} report called after each poll, with its error
 * @returns {() => void} polls at once, also after a poll that failed
 */
export function poll(look, report) {
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
    report(failed);
    if (failed instanceof Unauthorized) return; // the user has to enter a token first
    timer = setTimeout(turn, document.hidden ? HIDDEN_MS : failed ? LOST_MS : SEEN_MS);
  }

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) turn();
  });
  turn();
  return turn;
}
