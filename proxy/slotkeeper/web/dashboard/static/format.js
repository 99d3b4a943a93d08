/** How figures are written. Every number, time and name that the page shows comes from here. */

const grouped = new Intl.NumberFormat("en-GB");
const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];
export const NONE = "–";

/** @param {number|null|undefined} count in full: 134,360 */
export function exact(count) {
  return count == null ? NONE : grouped.format(count);
}

/** @param {number|null|undefined} count short where it is long: 9,870, 134k, 1.34M */
export function tokens(count) {
  if (count == null || Math.abs(count) < 10_000) return exact(count);
  if (Math.abs(count) < 999_500) return `${(count / 1e3).toFixed(count < 99_950 ? 1 : 0)}k`;
  return `${(count / 1e6).toFixed(2)}M`;
}

/** @param {number|null|undefined} time in seconds: 4.1 ms, 340 ms, 12.3 s, 3 min 5 s, 2 h 10 min */
export function seconds(time) {
  if (time == null) return NONE;
  const size = Math.abs(time);
  if (size < 0.001) return size === 0 ? "0 s" : "< 1 ms";
  if (time < 0) return `−${seconds(size)}`;
  if (size < 0.9995) return `${(time * 1000).toFixed(size < 0.00995 ? 1 : 0)} ms`;
  if (size < 59.95) return `${time.toFixed(1)} s`;
  const whole = Math.round(time);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** @param {number|null|undefined} time in seconds, coarse: 4 s ago */
export function age(time) {
  if (time == null) return NONE;
  if (time < 1.5) return "now";
  if (time < 60) return `${Math.round(time)} s ago`;
  if (time < 3600) return `${Math.round(time / 60)} min ago`;
  return `${Math.round(time / 3600)} h ago`;
}

/** @param {number|null|undefined} size in bytes */
export function bytes(size) {
  if (size == null) return NONE;
  let unit = 0;
  while (size >= 1024 && unit < BYTES.length - 1) [size, unit] = [size / 1024, unit + 1];
  return `${size.toFixed(unit === 0 || size >= 100 ? 0 : 1)} ${BYTES[unit]}`;
}

/** @param {number|null} part of 1: 93.4 % */
export function percent(part) {
  if (part == null || !Number.isFinite(part)) return NONE;
  return `${(part * 100).toFixed(part >= 0.9995 || part < 0.0005 ? 0 : 1)} %`;
}

/** @param {number|null} value with two digits: 1.00 */
export function ratio(value) {
  return value == null || !Number.isFinite(value) ? NONE : value.toFixed(2);
}

/** @param {string|number|Date} moment on this browser's clock face: 12:03:41 */
export function time(moment) {
  return clock.format(new Date(moment));
}

/** What a conversation is called: the client's own name for it, else its number. */
export function conversation({ named, conversation: number }) {
  if (named) return named;
  return number == null ? "no conversation" : `conversation ${number}`;
}

/** The words of the API as a person reads them: tool_round_trip → tool round trip. */
export function words(value) {
  return value == null ? NONE : value.replaceAll("_", " ");
}

/** @param {number} count @param {string} noun */
export function plural(count, noun) {
  return `${exact(count)} ${noun}${count === 1 ? "" : "s"}`;
}
