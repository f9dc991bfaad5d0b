// A batch: its rollouts as lanes over time and as a list; a group of it side by side, token by token.
import { box, cells, element, get, number, svg, table } from "./tools.js";

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

// `branch`: these were trained another time, long after, and what they waited for then says nothing.
function lanes(batch, branch) {
  const timed = batch.samples.filter((one) => one.times.started && one.times.finished).slice(0, MOST_LANES);
  if (!timed.length) return element("p", { class: "soft" }, "these samples have no times");
  const first = Math.min(...timed.map((one) => one.times.claimed || one.times.started));
  const end = Math.max(branch ? 0 : batch.time_s, ...timed.map((one) => one.times.scored || one.times.finished));
  const width = 1000, x = (time) => (width * (time - first)) / Math.max(1e-6, end - first);
  const { order, at } = colours(timed.flatMap((one) => one.turns.flatMap((turn) => [turn.first_version, turn.last_version])));
  const bar = (from, to, row, kind, title) => {
    const one = svg("rect", { x: x(from), y: row * LANE + 1, width: Math.max(0.5, x(to) - x(from)), height: LANE - 2, class: kind });
    one.append(svg("title", {}, title));
    return one;
  };
  const bars = timed.flatMap((one, row) => {
    const { claimed, started, finished, scored } = one.times;
    const who = `task ${one.task}, rollout ${one.rollout}`;
    let before = claimed || started, kind = "wait", said = "waits";
    const made = [];
    const until = (time, kind, said) => {
      if (time > before) made.push(bar(before, time, row, kind, `${who}: ${said} ${number(time - before, 3)} s`));
      before = Math.max(before, time);
    };
    // Between two turns, and after the last one, the rollout's own code is at work; before a turn begins it waits for an engine.
    for (const turn of one.turns) {
      until(turn.asked_s, kind, said);
      until(turn.began_s, "wait", "waits for an engine");
      const changed = turn.first_version === turn.last_version ? "" : ` to ${turn.last_version}`;
      until(turn.finished_s, `f${at(turn.first_version)}`, `version ${turn.first_version}${changed} generates`);
      [kind, said] = ["tools", "tools and other code of the rollout"];
    }
    until(finished, kind, said);
    return [
      ...made,
      ...(scored > finished ? [bar(finished, scored, row, "reward", `${who}: reward ${number(scored - finished, 3)} s`)] : []),
      ...(branch ? [] : [bar(Math.max(scored || 0, finished), batch.time_s, row, "after", `${who}: in the queue and in the step ${number(batch.time_s - Math.max(scored || 0, finished), 3)} s`)]),
    ];
  });
  const height = timed.length * LANE;
  const drawing = svg("svg", { class: "lanes", viewBox: `0 0 ${width} ${height + 14}`, preserveAspectRatio: "none", height: height + 14, role: "img" }, ...bars);
  drawing.setAttribute("aria-label", `${timed.length} rollouts over ${number(end - first, 3)} seconds`);
  const key = order.map((version) => element("span", { class: `key v${at(version)}` }, `generates, version ${version}`));
  const hidden = batch.samples.length - timed.length;
  return element("div", {}, element("p", {}, ...key, element("span", { class: "soft" }, `palest: waits; middle: tools; strongest: reward${branch ? "" : "; grey: queue and step"}; ${number(end - first, 3)} s in all${hidden ? `; ${hidden} more are not drawn` : ""}`)), drawing);
}

// What is looked for stays while one walks through batches.
const asked = { batches: "1" };

// Samples of one or several batches, up to a version, that pass the filters.
function list(place, upto, versions, run) {
  const field = (name, label, attributes) => element("input", { name, "aria-label": label, placeholder: label, value: asked[name] || "", ...attributes });
  const choice = (name, label, values) => element("select", { name, "aria-label": label },
    element("option", { value: "" }, `any ${label}`), ...values.map((value) => element("option", { value, selected: asked[name] === value }, value)));
  const numeric = { type: "number", step: "any", class: "short" };
  const fields = [
    field("batches", "batches to look at", { type: "number", min: 1, max: 1000, class: "short", title: "how many batches are looked at, from this one back" }),
    field("least_reward", "reward ≥", numeric), field("most_reward", "reward ≤", numeric),
    field("least_tokens", "tokens ≥", { ...numeric, step: 1 }), field("most_tokens", "tokens ≤", { ...numeric, step: 1 }), field("task", "task", { ...numeric, step: 1 }),
    choice("became", "end", ["trained", "dropped", ...(run.reasons || [])]), choice("status", "status", ["completed", "truncated", "aborted", "failed"]),
    choice("version", "version", versions), field("text", "text in prompt or answer", { type: "search" }),
  ];
  const told = element("p", { class: "soft", role: "status" }), on = element("button", { type: "button", hidden: true }, "Look further back");
  const heads = ["batch", "task", "rollout", word, "end", "status", "versions", "tokens", "trained", "engine", "text"];
  const done = table(heads, [], [2, 3, 7, 8]);
  const body = done.querySelector("tbody");
  let sums = null, turn = 0, next = null;

  async function look(from, skip) {
    const mine = ++turn;
    told.textContent = "looking …";
    on.hidden = true;
    const query = new URLSearchParams(Object.entries(asked).filter(([, value]) => value));
    query.set("upto", from);
    query.set("skip", skip);
    let found;
    try {
      found = await get(`api/samples?${query}`);
    } catch (error) {
      if (mine === turn) told.textContent = error.message;
      return;
    }
    if (mine !== turn) return;
    sums = { hits: sums.hits + found.samples.length, samples: sums.samples + found.num_samples, batches: sums.batches + found.batches, missing: sums.missing + found.missing };
    body.append(...cells(found.samples.map(({ line, text }) => [
      element("a", { href: path(line.batch.split(".")[1]) }, line.batch), element("a", { href: path(line.batch.split(".")[1], line.task) }, `${line.task}`),
      [numbered(line), ...origin(line)].join(", "), number(line.reward, 3), line.became, line.status,
      line.first_version === line.last_version ? line.first_version : `${line.first_version} – ${line.last_version}`,
      number(line.num_tokens), number(line.num_trained), line.engine, text,
    ]), [2, 3, 7, 8]));
    const missing = sums.missing ? `; ${sums.missing} messages are not there any more, or cannot be read` : "";
    told.textContent = `${number(sums.hits)} of ${number(sums.samples)} samples of ${number(sums.batches)} ${sums.batches === 1 ? "batch" : "batches"}, down to version ${found.first}${missing}`;
    next = found;
    on.hidden = found.more === null;
  }
  function anew() {
    for (const one of fields) asked[one.name] = one.value;
    sums = { hits: 0, samples: 0, batches: 0, missing: 0 };
    body.replaceChildren();
    look(upto, 0);
  }
  let timer = 0;
  for (const one of fields) one.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(anew, 300); });
  on.addEventListener("click", () => look(next.more, next.skip));
  place.append(box("Samples", element("div", { class: "bar" }, element("label", {}, "batches ", fields[0]), ...fields.slice(1)), told, done, on));
  anew();
}

// How a token is coloured: by the version that sampled it, by how likely it was to the sampler, or by whether it is trained on.
const LIKELY = [0.9, 0.5, 0.1, 0.01];
const likely = (logprob) => { const at = LIKELY.findIndex((least) => Math.exp(logprob) >= least); return at < 0 ? LIKELY.length : at; };
const kinds = {
  version: (one, index, at) => (one.versions[index] === null ? "" : `v${at(one.versions[index])}`),
  logprob: (one, index) => (one.versions[index] === null ? "" : `p${likely(one.logprobs[index])}`),
  mask: (one, index) => (one.mask[index] ? "v2" : ""),
  weight: (one, index) => (weightOf(one, index) === null ? "" : `p${weighty(weightOf(one, index))}`),
};
const weightOf = (one, index) => one.weights?.[index] ?? null;
// How far a weight is from 1, on either side; 0 is a token that the correction rejected.
const WEIGHTY = [["within 5 % of 1", 0.05], ["within 20 %", 0.2], ["within a half", 0.5], ["further", Infinity]];
const weighty = (weight) => (weight === 0 ? WEIGHTY.length : WEIGHTY.findIndex(([, most]) => Math.abs(weight - 1) <= most));

const numbered = (one) => `${one.rollout}${one.sample ? `.${one.sample}` : ""}`;
// Who made it, and which sample of its rollout it has left.
const origin = (one) => [one.agent && `agent ${one.agent}`, one.branch_of !== null && `branch of ${one.rollout}${one.branch_of ? `.${one.branch_of}` : ""}`].filter(Boolean);
const titled = (one) => [`rollout ${numbered(one)}`, ...origin(one)].join(", ");

// The mean over the sample's trained tokens; most estimators give all of them the same.
function advantage(one) {
  if (!one.advantage) return "";
  const { mean, min, max } = one.advantage;
  return `, advantage ${number(mean, 3)}${min === max ? "" : ` (tokens: ${number(min, 3)} to ${number(max, 3)})`}`;
}

let word = "reward"; // of a branch it is that which was recorded with its parent's samples

function headed(one) {
  const parts = Object.entries(one.reward_parts).map(([name, value]) => `${name} ${number(value, 3)}`).join(", ");
  return `${titled(one)}: ${word} ${number(one.reward, 3)}${parts ? ` (${parts})` : ""}${advantage(one)}, ${one.became}`;
}

function side(one, kind, at) {
  const spans = one.tokens.map((text, index) => {
    const version = one.versions[index];
    const told = version === null ? "no model sampled it" : `version ${version}, log-probability ${one.logprobs[index]} (sampler)`
      + (weightOf(one, index) === null ? "" : ` and ${one.trainer_logprobs[index]} (trainer), importance weight ${one.weights[index]}`)
      + ((one.advantages?.[index] ?? null) === null ? "" : `, advantage ${one.advantages[index]}`);
    return element("span", { class: `${kinds[kind](one, index, at)}${one.mask[index] ? "" : " masked"}`.trim(), title: `${told}${one.mask[index] ? "" : "; not trained"}; id ${one.ids[index]}` }, text);
  });
  const more = one.num_tokens > one.tokens.length ? [element("p", { class: "soft" }, `the first ${number(one.tokens.length)} tokens are shown`)] : [];
  const by = [one.engine && `engine ${one.engine}`, one.producer, `finished by ${one.finish_reason}`, one.metadata].filter(Boolean).join(" · ");
  return element("section", { class: "box" }, element("h2", {}, `${headed(one)}, ${one.status}, ${number(one.num_tokens)} tokens`), element("p", { class: "soft" }, by), element("div", { class: "tokens" }, ...spans), ...more);
}

function talk(one) {
  const said = one.conversation.map((part) => {
    const facts = [part.sampled ? "sampled" : "", part.num_tokens ? `${number(part.num_tokens)} tokens` : "", part.seconds !== null ? `${number(part.seconds, 3)} s` : "", part.sampled ? part.engine : "", part.finish_reason].filter(Boolean).join(", ");
    return element("div", { class: `said ${part.sampled ? "sampled" : ""}` }, element("p", {}, element("b", {}, part.role), " ", element("span", { class: "soft" }, facts)), element("div", { class: "tokens" }, part.text));
  });
  return element("section", { class: "box" }, element("h2", {}, headed(one)), ...said);
}

const WEIGHTS = {
  "train/tis": "mean importance weight", "train/tis_abs": "mean distance from 1", "train/tis_clipfrac": "part that met a bound",
  "train/train_rollout_logprob_abs_diff": "mean distance of log-probabilities", "train/train_rollout_logprob_abs_diff_max": "greatest distance", "train/ppo_kl": "KL",
};

// Numbers of the batch, for those of single tokens are kept of the newest batches only.
function weights(found) {
  const rows = Object.entries(WEIGHTS).filter(([name]) => name in found.weights).map(([name, said]) => [said, number(found.weights[name]), name]);
  const known = found.samples.some((one) => one.weights);
  return box("Importance weights", element("p", { class: "soft" }, known ? "Of the batch as a whole:"
    : "The weights of single tokens are not known: they are kept of samples that were trained, in the newest batches (trainer.token_weights_bytes). Of the batch as a whole:"),
    rows.length ? table(["", "value", "metric"], rows, [1]) : element("p", { class: "soft" }, "its ledger entry has no numbers of weights"));
}

let shownAs = "conversation";

async function group(place, number_, task) {
  const found = await get(`api/batches/${number_}/tasks/${task}`);
  const { order, at } = colours(found.samples.flatMap((one) => one.versions));
  const ways = { conversation: "as a conversation", version: "tokens by version", logprob: "tokens by log-probability", weight: "tokens by importance weight", mask: "tokens by loss mask" };
  const way = element("select", { "aria-label": "Shown" }, ...Object.entries(ways).map(([value, said]) => element("option", { value, selected: value === shownAs }, said)));
  const key = element("p"), room = element("div");
  function draw() {
    shownAs = way.value;
    const keys = {
      version: order.map((version) => element("span", { class: `key v${at(version)}` }, `version ${version}`)),
      logprob: [...LIKELY.map((least, kind) => element("span", { class: `key p${kind}` }, `probability ≥ ${least}`)), element("span", { class: `key p${LIKELY.length}` }, "less")],
      weight: found.samples.some((one) => one.weights) ? [...WEIGHTY.map(([said], kind) => element("span", { class: `key p${kind}` }, said)), element("span", { class: `key p${WEIGHTY.length}` }, "rejected")] : [],
      mask: [element("span", { class: "key v2" }, "trained on")],
    };
    key.replaceChildren(...(keys[shownAs] || []), ...(shownAs === "conversation" ? [] : [element("span", { class: "soft" }, "pale: not trained on")]));
    room.replaceChildren(...(shownAs === "weight" ? [weights(found)] : []),
      element("div", { class: "group" }, ...found.samples.map((one) => (shownAs === "conversation" ? talk(one) : side(one, shownAs, at)))),
      ...(found.more ? [element("p", { class: "soft" }, `${number(found.more)} more samples are not shown`)] : []));
  }
  way.addEventListener("change", draw);
  const first = found.samples[0];
  const unknown = found.samples.some((one) => one.became === "trained") && !found.samples.some((one) => one.advantage);
  place.append(
    element("p", {}, element("a", { href: path(number_) }, `← batch of version ${number_}`)),
    ...(first ? [box(`Task ${task}`, element("div", { class: "tokens" }, first.prompt), ...(first.label === null ? [] : [element("p", { class: "soft" }, `label: ${first.label}`)]))] : []),
    element("div", { class: "bar" }, element("label", {}, "Shown ", way)), key,
    ...(unknown ? [element("p", { class: "soft" }, "The advantages of these samples are not known: a run keeps those of its newest batches of reinforcement learning (trainer.token_weights_bytes), a branch none.")] : []), room,
  );
  draw();
}

async function batchView(place, wanted, run) {
  const batch = await get(`api/batches/${wanted}`);
  const missing = batch.missing ? ` ${batch.missing} of its messages are not there any more, or are too many to be read.` : "";
  place.append(
    box(`Batch of version ${batch.version}`, element("p", { class: "soft" }, `${batch.source}, ${batch.num_groups} groups, ${batch.samples.length} samples, digest ${batch.digest || "–"}.${missing}`), lanes(batch, run.branch)),
  );
  list(place, wanted, [...new Set(batch.samples.map((one) => one.first_version))].sort(), run);
  if (batch.drops.length) place.append(box("Dropped before it", table(["reason", "task", "rollouts", "sequence", "detail"], batch.drops.map((one) => [one.reason, one.task, one.rollouts.join(", "), one.sequence || "–", one.detail]), [1, 3])));
}

export function samples(place, run, [wanted, task]) {
  word = run.branch ? "recorded reward" : "reward";
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
  const work = chosen < 1 ? Promise.reject(new Error("no batch was trained yet")) : /^\d{1,18}$/.test(task || "") ? group(body, chosen, task) : batchView(body, chosen, run);
  work.then(() => room.replaceChildren(body), (error) => room.replaceChildren(element("p", { class: "bad" }, error.message))).finally(() => room.removeAttribute("aria-busy"));
  return { update() {}, close() {} };
}
