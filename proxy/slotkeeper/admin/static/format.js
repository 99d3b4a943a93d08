/** Formats of all numbers, times and names on the page. */

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

/** Time saved in sums of requests; "unknown" if there were requests, but it is known for none of them. */
export function timeSaved({ requests, saved_seconds: time }) {
  return requests && time == null ? "unknown" : seconds(time);
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

/** @param {string|number|Date} moment in the browser's time zone: 12:03:41 */
export function time(moment) {
  return clock.format(new Date(moment));
}

/**
 * Name of a conversation, as the server gives it. Its age is added if the server does not say what it is about.
 * @param {{name: ?string, about: ?string, conversation_began?: string}} request
 * @param {number} [now] the server's clock in ms
 */
export function conversation({ name, about, conversation_began: began }, now) {
  if (!name) return "no conversation";
  return about || !began || now === undefined ? name : `${name}, ${span((now - Date.parse(began)) / 1000)}`;
}

/** @param {number} time in seconds, in one unit: 4 s, 3 min, 2 h, 5 d */
export function span(time) {
  const whole = Math.max(0, Math.floor(time));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min`;
  return whole < 86_400 ? `${Math.floor(whole / 3600)} h` : `${Math.floor(whole / 86_400)} d`;
}

/** A value of the API's enums in plain words: tool_round_trip → tool round trip. */
export function words(value) {
  return value == null ? NONE : value.replaceAll("_", " ");
}

/** @param {number} count @param {string} noun */
export function plural(count, noun) {
  return `${exact(count)} ${noun}${count === 1 ? "" : "s"}`;
}
