/** The addresses to point a client at, shown until the first request. */

import { byId, say } from "./dom.js";

/** @param {?{scheme: string, address: string, port: number, everywhere: boolean}} port the data port, as the API has it */
export function welcome(port) {
  byId("welcome").hidden = !port;
  if (!port) return;
  // A data port that listens on every address is reached by the host name of this page.
  const base = `${port.scheme}://${port.everywhere ? `${location.hostname}:${port.port}` : port.address}`;
  say(byId("welcome-v1"), `${base}/v1`);
  say(byId("welcome-base"), base);
}
