/** Where to point a client at, while none has come. */

import { byId, say } from "./dom.js";

/** @param {?{scheme: string, address: string, port: number, everywhere: boolean}} port the data port, as the API has it */
export function welcome(port) {
  byId("welcome").hidden = !port;
  if (!port) return;
  // One that listens on every address is reached by the name under which this page was.
  const base = `${port.scheme}://${port.everywhere ? `${location.hostname}:${port.port}` : port.address}`;
  say(byId("welcome-v1"), `${base}/v1`);
  say(byId("welcome-base"), base);
}
