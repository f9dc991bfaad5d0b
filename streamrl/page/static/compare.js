// This run beside others of the same directory of runs: by version, step, trained tokens, or time since the first batch.
import { Chart } from "./charts.js";
import { chosen, controls } from "./controls.js";
import { box, element, get, number, paced, table } from "./tools.js";

// Title, name, whether it is of branches alone.
const CURVES = [
  ["Reward", "reward"],
  ["Loss, nats", "loss"],
  ["Distance to the parent, nats", "parent_distance", true],
  ["Distance to the policies that sampled, nats", "sampler_distance"],
  ["Staleness of trained tokens, versions, mean", "staleness"],
  ["Staleness of trained tokens, versions, p95", "staleness_p95"],
  ["Tokens trained a second", "throughput"],
];
const AXES = { version: "by version", step: "by step", tokens: "by tokens trained", elapsed_s: "by time since the first batch" };
const UNITS = [["seconds", 1, 600], ["minutes", 60, 7200], ["hours", 3600, Infinity]];
const address = (names, x) => `#compare/${names.join(",")}/${x}`;

const unit = (seconds) => UNITS.find(([, , most]) => seconds < most);

function duration(seconds) {
  const [name, size] = unit(seconds);
  return `${number(seconds / size, 3)} ${name}`;
}

// Rewards of a branch are those that its parent's samples had earned when they were recorded.
const rewarded = (one) => (one.parent ? `${one.name}, recorded with ${one.parent}'s samples` : one.name);

export function compare(place, run, [wanted, axis]) {
  const x = axis in AXES ? axis : "version";
  const names = (wanted || "").split(",").filter(Boolean);
  const choice = element("select", { "aria-label": "Add a run" });
  const axes = element("select", { "aria-label": "Over" }, ...Object.entries(AXES).map(([value, said]) => element("option", { value, selected: value === x }, said)));
  const state = element("p", { class: "soft", role: "status" });
  const room = element("div", { class: "charts" }), tables = element("div");
  const go = (runs) => { location.hash = address(runs, axes.value); };
  const chips = names.map((name) => element("button", { type: "button", title: `leave ${name} out`, onclick: () => go(names.filter((one) => one !== name)) }, `${name} ×`));
  place.append(element("div", { class: "bar" }, element("b", {}, run.run), ...chips, choice, axes),
    controls(() => { drawn = ""; drawing.again(true); }, { axes: false }), state, room, tables);
  choice.addEventListener("change", () => { if (choice.value) go([...names, choice.value]); });
  axes.addEventListener("change", () => go(names));
  let charts = [], drawn = "", timer = 0, closed = false;

  async function list() {
    const { runs, most } = await get("api/others");
    const left = runs.filter((name) => !names.includes(name)), full = names.length >= most;
    const said = full ? `${most} beside this one are the most` : left.length ? (names.length ? "add a run" : "choose a run") : runs.length ? "there are no more runs" : "no other run lies beside this one";
    choice.replaceChildren(element("option", { value: "" }, said), ...(full ? [] : left.map((name) => element("option", { value: name }, name))));
  }

  function chartsOf(runs, over) {
    for (const chart of charts) chart.close();
    room.replaceChildren();
    charts = CURVES.filter(([, , branches]) => !branches || runs.some((one) => one.parent)).map(([title, name]) =>
      new Chart(room, title, runs.map((one, at) => ({ table: String(at), name, label: name === "reward" ? rewarded(one) : one.name })), over, { ...chosen(over)[1] }));
  }

  function tell({ runs, differences, trouble }) {
    const row = (title, value) => [title, ...runs.map(value)], last = (title, name, digits) => row(title, (one) => number(one.last[name], digits));
    const branches = runs.filter((one) => one.parent);
    tables.replaceChildren(
      box("The newest 20 batches", table(["", ...runs.map((one) => one.name)], [
        ...(branches.length < runs.length ? [row("reward", (one) => (one.parent ? "–" : number(one.last.reward)))] : []),
        ...(branches.length ? [row("recorded reward", (one) => (one.parent ? number(one.last.reward) : "–")), last("distance to the parent, nats", "parent_distance")] : []),
        last("loss", "loss"), last("distance to the policies that sampled, nats", "sampler_distance"),
        last("staleness, mean", "staleness"), last("staleness, p95", "staleness_p95"), last("tokens trained a second", "throughput", 3),
        row("batches", (one) => number(one.batches)), row("from first to newest", (one) => duration(one.seconds)),
      ], runs.map((_, at) => at + 1))),
      box("Where the configurations differ", ...(trouble ? [element("p", { class: "soft" }, trouble)] : []),
        differences.length ? table(["key", ...runs.map((one) => one.name)], differences) : element("p", { class: "soft" }, trouble ? "" : "nowhere")));
  }

  async function draw() {
    if (!names.length) return;
    const smooth = chosen(x)[1].smooth;
    const found = await get(`api/compare?${new URLSearchParams({ runs: names.join(","), x, smooth })}`);
    if (closed) return;
    const { runs, reading } = found;
    state.textContent = reading ? `reading: ${Math.floor((100 * reading.done) / Math.max(1, reading.total))} %` : "";
    const [name, size] = x === "elapsed_s" ? unit(Math.max(...runs.map((one) => one.seconds))) : [x, 1];
    const over = x === "elapsed_s" ? `${name} since the first batch` : name;
    if (drawn !== over) chartsOf(runs, over);
    drawn = over;
    const answers = Object.fromEntries(runs.map((one, at) => [at, { x: one.x.map((value) => value / size), values: one.values }]));
    for (const chart of charts) chart.show(answers);
    tell(found);
    clearTimeout(timer);
    timer = setTimeout(() => drawing.again(), reading ? 0 : 15000);
  }

  const drawing = paced(draw, 500);
  list().catch((error) => { state.textContent = error.message; });
  return { update() {}, close() { closed = true; clearTimeout(timer); drawing.close(); for (const chart of charts) chart.close(); } };
}
