// What one looks at first: is it learning, how fast, how stale, what is lost.
import { Chart, fill } from "./charts.js";
import { chosen, controls } from "./controls.js";
import { lengths } from "./lengths.js";
import { box, clock, element, get, lasting, number, paced, table } from "./tools.js";

const batch = (name, label) => ({ table: "batch", name, label });
const PART = "rollout/reward_part/";
const SMOOTH = 20;
const since = (name, label, rate) => ({ table: "window", name, label, rate });

function chartsOf(run) {
  // In the order in which the states are declared: what is work comes first.
  const known = new Set(run.tables.window || []);
  const shares = (prefix) => Object.keys(run.metrics).filter((name) => name.startsWith(prefix) && known.has(name)).map((name) => since(name, name.slice(prefix.length)));
  const reasons = (run.tables.batch || []).filter((name) => name.startsWith("rollouts/dropped_total/"));
  const lost = (run.tables.batch || []).filter((name) => name.startsWith("tokens/dropped_total/"));
  const quantiles = (part) => ["finished", "cut", "trained", "dropped"].map((what) => since(`lengths/${what}_${part}`, what));
  // Of sets of problems: their means, and what else is known of each.
  const told = run.tables.evaluation || [];
  const of = (names) => names.map((name) => ({ table: "evaluation", name, label: setName(name.slice(5)) }));
  const rates = told.filter((name) => /-(pass|maj)@(?!1$)\d+$/.test(name));
  const means = told.filter((name) => !/-((pass|maj)@\d+|ci_low|ci_high|truncated_ratio|failed_ratio|response_len|took_s)$/.test(name));
  const all = [
    [run.branch ? "Recorded reward, batch by batch" : "Reward, batch by batch", "version", [batch("rollout/raw_reward", "mean of the batch"), ...of(means)]],
    ["Tokens a second", "time_s", [since("tokens/sampled_total", "sampled", true), since("tokens/published_total", "published", true), since("tokens/cut_total", "cut, never published", true)]],
    ["What became of published tokens, by batch", "version", [batch("tokens/trained_total", "trained"), batch("tokens/masked_total", "masked"), ...lost.map((name) => batch(name, `dropped: ${name.slice("tokens/dropped_total/".length)}`))]],
    ["Advantages of trained tokens", "version", ["min", "max", "std", "abs"].map((what) => batch(`rollout/advantages_${what}`, what === "abs" ? "mean of |advantage|" : what))],
    ["Staleness of trained tokens, versions", "version", [batch("staleness/mean", "mean"), batch("staleness/p95", "p95"), batch("staleness/max", "max")]],
    ["Where the age comes from, versions", "version", [batch("staleness/in_flight", "in flight"), batch("staleness/queued", "queued"), batch("staleness/publish_lag", "publish lag")]],
    ["Behind the newest batch, seconds", "time_s", [since("lag/stream_s", "oldest message"), since("lag/publish_to_commit_s", "publish to commit")]],
    ["Behind the newest batch, tokens", "time_s", [since("lag/stream_tokens", "on the stream")]],
    ["Versions that engines are behind", "time_s", [since("lag/versions_behind", "worst engine")]],
    ["Dropped rollouts a batch", "version", reasons.map((name) => batch(name, name.slice("rollouts/dropped_total/".length)))],
    ["A batch's seconds", "version", [batch("perf/step_s", "step"), batch("perf/wait_s", "wait for samples")]],
    ["Sampler against trainer, nats", "version", [batch("train/train_rollout_logprob_abs_diff", "distance"), batch("train/entropy_loss", "entropy"), batch("train/ppo_kl", "KL")]],
    ["Answer lengths, tokens", "version", [batch("rollout/response_len/mean", "mean"), batch("rollout/response_len/max", "max")]],
    ["Lengths of answers by their end, median, tokens", "time_s", quantiles("p50")],
    ["Lengths of answers by their end, p95, tokens", "time_s", quantiles("p95")],
    ["Distance of the lengths trained from all", "time_s", [since("lengths/distance", "0: no length is treated otherwise")]],
  ];
  const times = [];
  for (const [who, title] of [["trainer", "Where the trainer's time goes"], ["producer", "Where the time of producers' slots goes"], ["engine", "Where the engines' time goes"]]) {
    const found = shares(`${who}/share/`);
    if (found.length) times.push([title, "time_s", found, { stacked: true }]);
  }
  all.splice(2, 0, ...times);
  if (rates.length) all.splice(1, 0, ["pass@k and maj@k of evaluations", "version", of(rates)]);
  const has = ([, , series]) => series.some((one) => (run.tables[one.table] || []).includes(one.name));
  return run.branch ? all.filter(has) : all; // a branch has no engines and no stream
}

const setName = (set) => (set === "heldout" ? "held-out" : set);

// Of a branch: its rewards were recorded with its parent's samples, and what differs is the loss and the distance to the parent.
const DISTANCE = "train/parent_logprob_abs_diff";

function branchCharts(run) {
  return [
    [`Recorded reward, of ${run.branch.parent}'s samples`, "version", [batch("rollout/raw_reward", "mean of the batch")]],
    ["Loss", "version", [batch("train/loss", "loss")]],
    ["Distance to the parent, nats", "version", [batch(DISTANCE, "from the parent, same samples"), batch("train/train_rollout_logprob_abs_diff", "from the policies that sampled")]],
  ];
}

function branchBox({ parent, parent_version, overrides, same_batches, here }) {
  return box(`A branch of ${parent} from version ${parent_version}`,
    element("p", {}, `It was trained again from samples that ${parent} recorded, with ${overrides.join(" ") || "nothing changed"}; its batches are ${same_batches ? "its parent's" : "its own"}. `
      + "Its rewards are those that were recorded with these samples: its own policy has earned none. Loss and the distance to the parent are its own."),
    here ? element("a", { href: `#compare/${parent}/version` }, `Beside ${parent}, with where the configurations differ`) : element("p", { class: "soft" }, `${parent} does not lie beside it, so its samples cannot be shown.`));
}

// Whether it is learning: the newest batches' mean with its parts, and the first set of problems with its interval.
function firstCharts(run) {
  if (run.branch) return branchCharts(run);
  const parts = (run.tables.batch || []).filter((name) => name.startsWith(PART)).map((name) => batch(name, name.slice(PART.length)));
  const set = (run.glance && run.glance.heldout_set) || "heldout", name = `eval/${set}`;
  const bound = (end, label) => ({ table: "evaluation", name: `${name}-ci_${end}`, label, edge: true });
  const loss = (run.tables.batch || []).includes("rollout/raw_reward") ? [] : [batch("train/loss", "loss")];
  return [
    [loss.length && run.tables.batch ? "Loss" : "Reward", "version", [batch("rollout/raw_reward", "mean of the batch"), ...parts, ...loss], { smooth: SMOOTH }],
    ["Held-out", "version", [{ table: "evaluation", name, label: setName(set) }, bound("low", "95 % from"), bound("high", "to")]],
  ];
}

// What a reader has unfolded stays so.
const FOLD = "streamrl.charts";
const kept = () => { try { return localStorage.getItem(FOLD) === "open"; } catch { return false; } };
const keep = (open) => { try { localStorage.setItem(FOLD, open ? "open" : "closed"); } catch { /* a browser that keeps nothing */ } };

const signs = { ok: "good", warn: "warn", breach: "bad" };
const level = (word) => element("span", { class: `name ${signs[word] || "soft"}` }, word || "not judged yet");

// While a run is up, what it is held to and how it does; of one that is over, the worst of each objective.
function objectives(run) {
  const worst = Object.entries(run.worst);
  if (worst.length) return box("Objectives, their worst over the run", table(["objective", "worst"], worst.map(([name, word]) => [name, level(word)])));
  const { lines } = run.objectives;
  if (!lines.length) return "";
  const cells = lines.map((one) => [
    element("span", { class: "name" }, one.objective), level(one.level), number(one.value, 3), number(one.bound), one.since_s ? clock(one.since_s) : "–",
    (one.causes || []).map((cause) => cause.what).join("\n"), (one.causes || []).map((cause) => cause.hint).join("\n"),
  ]);
  return box("Objectives", table(["objective", "state", "value", "bound", "since", "likely cause", "what to turn"], cells, [2, 3]));
}

function say(line, text) {
  line.hidden = !text;
  if (line.textContent !== text) line.textContent = text; // a reader of the screen is told of changes only
}

function tile(place, name, value, below) {
  place.replaceChildren(element("b", {}, value), element("span", {}, name), element("p", { class: "soft" }, below));
}

export function overview(place, run) {
  const said = element("p", { class: "verdict", role: "status" });
  const account = element("p", { class: "soft" });
  const first = element("div", { class: "first" });
  const pace = element("section", { class: "card tile", "aria-label": "Steps a minute" });
  const left = element("section", { class: "card tile", "aria-label": "Time left" });
  const cards = element("div", { class: "cards" });
  const held = element("div", { role: "status" });
  const room = element("div", { class: "charts" });
  const notes = element("div");
  const spread = element("div");
  const fold = element("details", { open: kept() }, element("summary", {}, "All charts"), room, spread);
  const front = [], charts = [];
  let known = "", unfolded = "";
  place.append(said, ...(run.branch ? [branchBox(run.branch)] : []), first, controls(() => { known = unfolded = ""; drawing.again(true); }), account, cards, held, fold, notes);
  const drawnIn = (room, all) => all.map(([title, x, series, options]) => new Chart(room, title, series, ...chosen(x, options)));

  let judged = "", counted = "";
  function tell() {
    const counts = JSON.stringify(run.lengths);
    if (counts !== counted) spread.replaceChildren(lengths(run.lengths));
    counted = counts;
    const told = JSON.stringify([run.worst, run.objectives]);
    if (told !== judged) held.replaceChildren(objectives(run));
    judged = told;
    const newest = run.newest, glance = run.glance || {};
    const set = glance.heldout_set || "heldout", interval = glance.heldout_interval;
    const within = interval ? `, 95 % ${number(interval[0], 2)} to ${number(interval[1], 2)}` : "";
    say(said, glance.verdict || "");
    say(account, (glance.account || []).join(" · "));
    tile(pace, "steps a minute", number(glance.steps_per_minute, 3), `step ${run.step} of ${run.steps || "–"}`);
    tile(left, "time left", run.state === "running" ? lasting(glance.left_s) : "–", run.state);
    const values = run.branch ? [
      ["recorded reward", number(newest["rollout/raw_reward"], 3)], ["loss", number(newest["train/loss"], 3)],
      ["distance to the parent, nats", number(newest[DISTANCE], 3)], ["step", `${run.step}/${run.steps}`], ["tokens/s trained", number(run.trained_per_s, 3)],
    ] : [
      ["reward", number(newest["rollout/raw_reward"], 3)],
      [`${setName(set)}${within}`, number(newest[`eval/${set}`], 3)],
      ["step", `${run.step}/${run.steps}`],
      ["tokens/s sampled", number(run.sampled_per_s, 3)],
      ["tokens/s trained", number(run.trained_per_s, 3)],
      ["staleness p95", number(newest["staleness/p95"], 3)],
      ["stream lag, s", number(newest["lag/stream_s"], 3)],
      ["stream lag, tokens", number(newest["lag/stream_tokens"], 3)],
      ["versions behind", number(newest["lag/versions_behind"], 3)],
    ];
    cards.replaceChildren(...values.map(([name, value]) => element("div", { class: "card" }, element("b", {}, value), element("span", {}, name))));
  }

  async function draw() {
    const names = JSON.stringify([run.tables, run.glance && run.glance.heldout_set]);
    if (names !== known) {
      known = names;
      for (const chart of front.splice(0)) chart.close();
      first.replaceChildren();
      front.push(...drawnIn(first, firstCharts(run)));
      if (!run.branch) first.append(pace, left);
    }
    const wanted = fold.open ? names : "";
    if (wanted !== unfolded) {
      unfolded = wanted;
      for (const chart of charts.splice(0)) chart.close();
      room.replaceChildren();
      charts.push(...drawnIn(room, wanted ? chartsOf(run) : []));
    }
    await fill([...front, ...charts], run);
    const lately = (await get("api/notes")).slice(0, 20);
    notes.replaceChildren(
      ...(lately.length ? [box("Said lately", table(["at", "by", "what"], lately.map((one) => [clock(one.time_s), one.worker, one.text || one.kind])))] : []),
    );
  }

  tell();
  const drawing = paced(draw);
  fold.addEventListener("toggle", () => { keep(fold.open); drawing.again(true); });
  let seen = run.changes;
  return {
    update() { tell(); if (run.changes !== seen) { seen = run.changes; drawing.again(); } },
    close() { drawing.close(); for (const chart of [...front, ...charts]) chart.close(); },
  };
}
