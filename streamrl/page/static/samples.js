// A batch: its rollouts as lanes over time and as a list; a group of it side by side, token by token.
import { box, element, get, number, table } from "/static/tools.js";

const MOST_LANES = 128, LANE = 9;

const path = (version, task) => `#samples/${version}${task === undefined ? "" : `/${task}`}`;

// Colours by version, the newest first.
function colours(versions) {
  const order = [...new Set(versions.filter(Boolean))].sort((a, b) => {
    const [x, y] = [a.split(".").map(Number), b.split(".").map(Number)];
    return y[0] - x[0] || y[1] - x[1];
  });
  return { order, at: (version) => order.indexOf(version) % 6 };
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function lanes(batch) {
  const timed = batch.samples.filter((one) => one.times.started && one.times.finished).slice(0, MOST_LANES);
  if (!timed.length) return element("p", { class: "soft" }, "these samples have no times");
  const first = Math.min(...timed.map((one) => one.times.claimed || one.times.started));
  const end = Math.max(batch.time_s, ...timed.map((one) => one.times.scored || one.times.finished));
  const width = 1000, x = (time) => (width * (time - first)) / Math.max(1e-6, end - first);
  const { order, at } = colours(timed.map((one) => one.first_version));
  const bar = (from, to, row, kind, title) => {
    const one = svg("rect", { x: x(from), y: row * LANE + 1, width: Math.max(0.5, x(to) - x(from)), height: LANE - 2, class: kind });
    one.append(svg("title", {}, title));
    return one;
  };
  const bars = timed.flatMap((one, row) => {
    const { claimed, started, finished, scored } = one.times;
    const who = `task ${one.task}, rollout ${one.rollout}`;
    const turns = one.turns.length ? one.turns : [[started, started, finished]];
    return [
      bar(claimed || started, finished, row, "wait", `${who}: waits, and tools: ${number(finished - (claimed || started), 3)} s in all`),
      ...turns.map(([asked, began, ended]) => bar(began || asked, ended, row, `f${at(one.first_version)}`, `${who}: generates ${number(ended - (began || asked), 3)} s, from version ${one.first_version}`)),
      ...(scored > finished ? [bar(finished, scored, row, "reward", `${who}: reward ${number(scored - finished, 3)} s`)] : []),
      bar(Math.max(scored || 0, finished), batch.time_s, row, "after", `${who}: in the queue and in the step ${number(batch.time_s - Math.max(scored || 0, finished), 3)} s`),
    ];
  });
  const height = timed.length * LANE;
  const drawing = svg("svg", { class: "lanes", viewBox: `0 0 ${width} ${height + 14}`, preserveAspectRatio: "none", height: height + 14, role: "img" }, ...bars);
  drawing.setAttribute("aria-label", `${timed.length} rollouts over ${number(end - first, 3)} seconds`);
  const key = order.map((version) => element("span", { class: `key v${at(version)}` }, `generates, version ${version}`));
  const hidden = batch.samples.length - timed.length;
  return element("div", {}, element("p", {}, ...key, element("span", { class: "soft" }, `faint: waits and tools; strongest: reward; grey: queue and step; ${number(end - first, 3)} s in all${hidden ? `; ${hidden} more are not drawn` : ""}`)), drawing);
}

function list(batch, place) {
  const least = element("input", { type: "number", step: "any", "aria-label": "Reward at least", placeholder: "reward ≥" });
  const most = element("input", { type: "number", step: "any", "aria-label": "Reward at most", placeholder: "reward ≤" });
  const all = (name) => [...new Set(batch.samples.map((one) => one[name]))].sort();
  const choice = (label, values) => element("select", { "aria-label": label }, element("option", { value: "" }, `any ${label}`), ...values.map((value) => element("option", { value }, value)));
  const status = choice("status", all("status")), version = choice("version", all("first_version"));
  const rows = element("div");
  function filter() {
    const found = batch.samples.filter((one) =>
      (least.value === "" || (one.reward !== null && one.reward >= Number(least.value))) &&
      (most.value === "" || (one.reward !== null && one.reward <= Number(most.value))) &&
      (!status.value || one.status === status.value) && (!version.value || one.first_version === version.value));
    const cells = found.slice(0, 500).map((one) => [
      element("a", { href: path(batch.version.split(".")[1], one.task) }, `${one.task}`), one.sample ? `${one.rollout}.${one.sample}` : one.rollout,
      number(one.reward, 3), one.status, one.first_version === one.last_version ? one.first_version : `${one.first_version} – ${one.last_version}`,
      number(one.num_tokens), number(one.num_trained), one.engine,
    ]);
    rows.replaceChildren(element("p", { class: "soft", role: "status" }, `${found.length} of ${batch.samples.length} samples`),
      table(["task", "rollout", "reward", "status", "versions", "tokens", "trained", "engine"], cells, [1, 2, 5, 6]));
  }
  for (const one of [least, most, status, version]) one.addEventListener("input", filter);
  place.append(box("Samples", element("div", { class: "bar" }, least, most, status, version), rows));
  filter();
}

function side(one, at) {
  const spans = one.tokens.map((text, index) => {
    const version = one.versions[index];
    const kind = [version === null ? "" : `v${at(version)}`, one.mask[index] ? "" : "masked"].filter(Boolean).join(" ");
    const told = version === null ? "no model sampled it" : `version ${version}, log-probability ${one.logprobs[index]}`;
    return element("span", { class: kind, title: `${told}${one.mask[index] ? "" : "; not trained"}; id ${one.ids[index]}` }, text);
  });
  const parts = Object.entries(one.reward_parts).map(([name, value]) => `${name} ${number(value, 3)}`).join(", ");
  const head = `rollout ${one.rollout}${one.sample ? `.${one.sample}` : ""}: reward ${number(one.reward, 3)}${parts ? ` (${parts})` : ""}, ${one.status}, ${number(one.num_tokens)} tokens`;
  const more = one.num_tokens > one.tokens.length ? [element("p", { class: "soft" }, `the first ${number(one.tokens.length)} tokens are shown`)] : [];
  return element("section", { class: "box" }, element("h2", {}, head), element("div", { class: "tokens" }, ...spans), ...more);
}

async function group(place, number_, task) {
  const found = await get(`/api/batches/${number_}/tasks/${task}`);
  const { order, at } = colours(found.flatMap((one) => one.versions));
  place.append(
    element("p", {}, element("a", { href: path(number_) }, `← batch of version ${number_}`)),
    ...(found.length ? [box(`Task ${task}`, element("div", { class: "tokens" }, found[0].prompt), ...(found[0].label === null ? [] : [element("p", { class: "soft" }, `label: ${found[0].label}`)]))] : []),
    element("p", {}, ...order.map((version) => element("span", { class: `key v${at(version)}` }, `version ${version}`)), element("span", { class: "soft" }, "pale: not trained")),
    element("div", { class: "group" }, ...found.map((one) => side(one, at))),
  );
}

async function batchView(place, wanted) {
  const batch = await get(`/api/batches/${wanted}`);
  const missing = batch.missing ? ` ${batch.missing} of its messages are not there any more, or are too many to be read.` : "";
  place.append(
    box(`Batch of version ${batch.version}`, element("p", { class: "soft" }, `${batch.source}, ${batch.num_groups} groups, ${batch.samples.length} samples, digest ${batch.digest || "–"}.${missing}`), lanes(batch)),
  );
  list(batch, place);
  if (batch.drops.length) place.append(box("Dropped before it", table(["reason", "task", "rollouts", "sequence", "detail"], batch.drops.map((one) => [one.reason, one.task, one.rollouts.join(", "), one.sequence || "–", one.detail]), [1, 3])));
}

export function samples(place, run, [wanted, task]) {
  const newest = run.version ? Number(run.version.split(".")[1]) : 0;
  const chosen = /^\d{1,12}$/.test(wanted || "") ? Number(wanted) : newest;
  const input = element("input", { type: "number", min: 1, value: chosen, "aria-label": "Version" });
  const go = (version) => { location.hash = path(version); };
  const form = element("form", { class: "bar", onsubmit: (event) => { event.preventDefault(); go(input.value); } },
    element("label", {}, "Batch of version ", input), element("button", {}, "Show"),
    element("button", { type: "button", onclick: () => go(Math.max(1, chosen - 1)) }, "Previous"),
    element("button", { type: "button", onclick: () => go(chosen + 1) }, "Next"),
    element("button", { type: "button", onclick: () => go(run.version.split(".")[1] || 1) }, "Newest"));
  const room = element("div", { "aria-busy": "true" }, element("p", { class: "soft" }, "reading …"));
  place.append(form, room);
  const body = document.createDocumentFragment();
  const work = chosen < 1 ? Promise.reject(new Error("no batch was trained yet")) : /^\d{1,18}$/.test(task || "") ? group(body, chosen, task) : batchView(body, chosen);
  work.then(() => room.replaceChildren(body), (error) => room.replaceChildren(element("p", { class: "bad" }, error.message))).finally(() => room.removeAttribute("aria-busy"));
  return { update() {}, close() {} };
}
