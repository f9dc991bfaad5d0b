// The frame: views by address, live state over server-sent events. Text from a run becomes text nodes only, never HTML.
import { compare } from "./compare.js";
import { drops } from "./drops.js";
import { metrics } from "./metrics.js";
import { overview } from "./overview.js";
import { samples } from "./samples.js";
import { versions } from "./versions.js";
import { Unanswered, element, get } from "./tools.js";

const views = { overview, versions, drops, samples, compare, metrics };
const titles = { overview: "Overview", versions: "Versions", drops: "Drops", samples: "Samples", compare: "Compare", metrics: "All metrics" };
const main = document.getElementById("main");
const nav = document.querySelector("nav");
let run = null; // what /api/run says; `newest` and others are kept up to date by events
let shown = null; // { update(run), close() } of the view
let place = null;

// A branch has no engines, which the view of versions is about.
function names() {
  for (const name of Object.keys(views)) if (!(run.branch && name === "versions")) nav.append(element("a", { href: `#${name}` }, titles[name]));
}

function tellState() {
  document.title = `${run.run} · streamrl`;
  document.getElementById("run").textContent = run.run;
  const parts = [...(run.branch ? [`branch of ${run.branch.parent}`] : []), run.state, `step ${run.step} of ${run.steps}`];
  if (run.version) parts.push(`version ${run.version}`);
  if (run.reading) parts.push(`reading ${Math.floor((100 * run.reading.done) / Math.max(1, run.reading.total))} %`);
  if (run.objectives.level) parts.push(`objectives: ${run.objectives.level}`);
  if (run.error) parts.push(run.error);
  document.getElementById("state").textContent = parts.join(" · ");
}

function tellTrouble(text) {
  const line = document.getElementById("trouble");
  line.hidden = !text;
  line.textContent = text;
}

function show() {
  if (location.hash === "#main") return; // the link that skips the head
  const [name, ...rest] = (location.hash.slice(1) || "overview").split("/");
  const known = views[name] ? name : "overview";
  if (place === location.hash && shown) return;
  place = location.hash;
  for (const link of nav.children) {
    if (link.hash === `#${known}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (shown) shown.close();
  main.replaceChildren();
  shown = views[known](main, run, rest);
}

// New metrics and workers have their tables and meanings from the server.
async function take(state) {
  const known = new Set(Object.keys(run.metrics));
  if (state.num_tables !== run.num_tables || Object.keys(state.newest).some((name) => !known.has(name))) {
    try {
      Object.assign(run, await get("api/run"));
    } catch (error) {
      if (!(error instanceof Unanswered)) throw error;
      state.num_tables = -1; // with the next state they are asked for again
    }
  }
  Object.assign(run, state);
  tellState();
  tellTrouble(state.trouble ? `the log cannot be read now: ${state.trouble}` : "");
  if (shown) shown.update(run);
}

// A tab in the background lets go of the line, so that the server rests; it has the newest state when it is looked at again.
let events = null;
function listen() {
  if (document.hidden) {
    if (events) events.close();
    events = null;
  } else if (!events) {
    events = new EventSource("api/live");
    events.onopen = () => tellTrouble("");
    events.onmessage = (event) => take(JSON.parse(event.data));
    events.onerror = () => tellTrouble("the page's server does not answer: has `streamrl up` ended? `streamrl page RUN` serves it again");
  }
}

try {
  run = await get("api/run");
  names();
  tellState();
  show();
  addEventListener("hashchange", show);
  document.addEventListener("visibilitychange", listen);
  listen();
} catch (error) {
  tellTrouble(String(error.message || error));
}
