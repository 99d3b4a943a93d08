/** The page: polls the API and shows each answer. */

import { alarms } from "./alarms.js";
import { clients } from "./clients.js";
import { ask, poll, serverNow, Unauthorized } from "./connection.js";
import { byId, put, say } from "./dom.js";
import { door } from "./door.js";
import { figures } from "./figures.js";
import { plural, seconds } from "./format.js";
import { lanes } from "./lanes.js";
import { requests } from "./requests.js";
import { running } from "./running.js";
import { slots } from "./slots.js";
import { slow } from "./slow.js";
import { theme } from "./theme.js";
import { tiers } from "./tiers.js";
import { tree } from "./tree.js";
import { welcome } from "./welcome.js";
import { why } from "./why.js";

const KEPT = 100; // requests to ask for
// Beside the title: what happens to a request that arrives now.
const SERVICES = {
  placed: "Live",
  wakes: "Live, engine asleep",
  passed: "Live, slots unknown",
  waits: "Requests wait",
  held: "Drained",
  fails: "No engine is up",
};

theme(byId("theme"));
const showFigures = figures(byId("figures"));
const showAlarms = alarms(byId("alarms"));
const showRunning = running(byId("running"));
const showSlow = slow(byId("slow"));
const showClients = clients(byId("clients"));
const showSlots = slots(byId("engines"));
const showLanes = lanes(byId("lanes"));
const showTree = tree(byId("tree"));
const showTiers = tiers(byId("tiers"));
const showRequests = requests(byId("requests"));
const lookAgain = why();
const connection = byId("connection");
let drawn = null; // the state that the tree shows
let service = null; // what happens to requests that arrive now

async function look() {
  const [state, { requests: found }] = await Promise.all([ask("/api/state"), ask(`/api/requests?limit=${KEPT}`)]);
  say(byId("vitals"), vitals(state));
  showFigures(state);
  showAlarms(state);
  service = state.service.state;
  showSlots(state.engines);
  showRunning(state.running, serverNow());
  showSlow(state.waits, found, serverNow());
  showClients(state.clients);
  welcome(state.data_port);
  showLanes(found, serverNow());
  showTiers(state.tiers);
  showRequests(found, serverNow());
  await Promise.all([lookAgain(), lookAtTree(state)]);
}

/** Fetch and draw the prompt tree, but only if something was computed, moved or saved since. */
async function lookAtTree({ totals, tiers: kept, engines }) {
  const held = engines.map((engine) => engine.slots.map((slot) => slot.held_tokens));
  const now = JSON.stringify([totals, kept, held]);
  if (now === drawn) return;
  showTree(await ask("/api/tree"));
  drawn = now;
}

function vitals({ version, uptime_seconds: uptime, queued, draining }) {
  const line = queued ? `${plural(queued, "request")} queued` : "no request is queued";
  const facts = [version, `up ${seconds(Math.floor(uptime))}`, line, draining ? "draining" : null];
  return facts.filter(Boolean).join(" · ");
}

function showConnection(failed) {
  if (failed instanceof Unauthorized) openDoor();
  const state = failed === null ? "live" : failed instanceof Unauthorized ? "locked" : "lost";
  const words = { live: SERVICES[service], locked: "Token needed", lost: "Connection lost, trying again" };
  put(connection, { "data-state": state, "data-service": state === "live" ? service : null });
  say(connection, words[state]);
  put(document.body, { "data-lost": state === "lost" ? "" : null });
}

const lookNow = poll(look, showConnection);
const openDoor = door(lookNow);
