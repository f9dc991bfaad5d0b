// What one looks at first: is it learning, how fast, how stale, what is lost.
import { Chart, fill } from "./charts.js";
import { lengths } from "./lengths.js";
import { box, clock, element, get, number, paced, table } from "./tools.js";

const batch = (name, label) => ({ table: "batch", name, label });
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
  const of = (names) => names.map((name) => ({ table: "evaluation", name, label: name === "eval/heldout" ? "held-out" : name.slice(5) }));
  const rates = told.filter((name) => /-(pass|maj)@(?!1$)\d+$/.test(name));
  const means = told.filter((name) => !/-((pass|maj)@\d+|truncated_ratio|failed_ratio|response_len|took_s)$/.test(name));
  const all = [
    ["Reward", "version", [batch("rollout/raw_reward", "mean of the batch"), ...of(means)]],
    ["Tokens a second", "time_s", [since("tokens/sampled_total", "sampled", true), since("tokens/published_total", "published", true), since("tokens/cut_total", "cut, never published", true)]],
    ["What became of published tokens, by batch", "version", [batch("tokens/trained_total", "trained"), batch("tokens/masked_total", "masked"), ...lost.map((name) => batch(name, `dropped: ${name.slice("tokens/dropped_total/".length)}`))]],
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
  return all;
}

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

export function overview(place, run) {
  const cards = element("div", { class: "cards" });
  const held = element("div", { role: "status" });
  const room = element("div", { class: "charts" });
  const notes = element("div");
  const spread = element("div");
  place.append(cards, held, room, spread, notes);
  const charts = [];
  let known = "";

  let judged = "", counted = "";
  function tell() {
    const counts = JSON.stringify(run.lengths);
    if (counts !== counted) spread.replaceChildren(lengths(run.lengths));
    counted = counts;
    const told = JSON.stringify([run.worst, run.objectives]);
    if (told !== judged) held.replaceChildren(objectives(run));
    judged = told;
    const newest = run.newest;
    const values = [
      ["reward", number(newest["rollout/raw_reward"], 3)],
      ["held-out", number(newest["eval/heldout"], 3)],
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
    const names = JSON.stringify(run.tables);
    if (names !== known) {
      known = names;
      for (const chart of charts.splice(0)) chart.close();
      room.replaceChildren();
      for (const [title, x, series, options] of chartsOf(run)) charts.push(new Chart(room, title, series, x, options));
    }
    await fill(charts, run);
    const said = (await get("api/notes")).slice(0, 20);
    notes.replaceChildren(
      ...(said.length ? [box("Said lately", table(["at", "by", "what"], said.map((one) => [clock(one.time_s), one.worker, one.text || one.kind])))] : []),
    );
  }

  tell();
  const drawing = paced(draw);
  let seen = run.changes;
  return {
    update() { tell(); if (run.changes !== seen) { seen = run.changes; drawing.again(); } },
    close() { drawing.close(); for (const chart of charts) chart.close(); },
  };
}
