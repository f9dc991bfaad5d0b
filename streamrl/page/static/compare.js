// This run beside another one of the same directory of runs: by version, and by time since the first batch.
import { Chart } from "./charts.js";
import { box, element, get, number, paced, table } from "./tools.js";

const CURVES = [
  ["Reward", "reward"],
  ["Loss, nats", "loss"],
  ["Staleness of trained tokens, versions, mean", "staleness"],
  ["Staleness of trained tokens, versions, p95", "staleness_p95"],
  ["Tokens trained a second", "throughput"],
];
const UNITS = [["seconds", 1, 600], ["minutes", 60, 7200], ["hours", 3600, Infinity]];
const address = (name, x) => `#compare/${name}/${x}`;

const unit = (seconds) => UNITS.find(([, , most]) => seconds < most);

function duration(seconds) {
  const [name, size] = unit(seconds);
  return `${number(seconds / size, 3)} ${name}`;
}

export function compare(place, run, [wanted, axis]) {
  const x = axis === "elapsed_s" ? axis : "version";
  const choice = element("select", { "aria-label": "The other run" });
  const axes = element("select", { "aria-label": "Over" },
    element("option", { value: "version", selected: x === "version" }, "by version"), element("option", { value: "elapsed_s", selected: x !== "version" }, "by time since the first batch"));
  const state = element("p", { class: "soft", role: "status" });
  const room = element("div", { class: "charts" }), tables = element("div");
  place.append(element("div", { class: "bar" }, element("label", {}, `${run.run} and `, choice), axes), state, room, tables);
  const go = () => { if (choice.value) location.hash = address(choice.value, axes.value); };
  choice.addEventListener("change", go);
  axes.addEventListener("change", go);
  let charts = [], drawn = "", timer = 0, closed = false;

  async function names() {
    const found = await get("api/others");
    choice.replaceChildren(element("option", { value: "" }, found.length ? "choose a run" : "no other run lies beside this one"),
      ...found.map((name) => element("option", { value: name, selected: name === wanted }, name)));
  }

  function chartsOf(runs, over) {
    for (const chart of charts) chart.close();
    room.replaceChildren();
    charts = CURVES.map(([title, name]) => new Chart(room, title, runs.map((one, at) => ({ table: String(at), name, label: one.name })), over));
  }

  function tell({ runs, differences, trouble }) {
    const row = (title, value) => [title, ...runs.map(value)];
    tables.replaceChildren(
      box("The newest 20 batches", table(["", ...runs.map((one) => one.name)], [
        row("reward", (one) => number(one.last.reward)), row("loss", (one) => number(one.last.loss)),
        row("staleness, mean", (one) => number(one.last.staleness)), row("staleness, p95", (one) => number(one.last.staleness_p95)),
        row("tokens trained a second", (one) => number(one.last.throughput, 3)),
        row("batches", (one) => number(one.batches)), row("from first to newest", (one) => duration(one.seconds)),
      ], [1, 2])),
      box("Where the configurations differ", trouble ? element("p", { class: "soft" }, trouble)
        : differences.length ? table(["key", ...runs.map((one) => one.name)], differences) : element("p", { class: "soft" }, "nowhere")));
  }

  async function draw() {
    if (!wanted) return;
    const found = await get(`api/compare/${encodeURIComponent(wanted)}?x=${x}`);
    if (closed) return;
    const { runs, reading } = found;
    state.textContent = reading ? `reading ${wanted}: ${Math.floor((100 * reading.done) / Math.max(1, reading.total))} %` : "";
    const [name, size] = x === "version" ? ["version", 1] : unit(Math.max(...runs.map((one) => one.seconds)));
    const over = x === "version" ? name : `${name} since the first batch`;
    if (drawn !== over) chartsOf(runs, over);
    drawn = over;
    const answers = Object.fromEntries(runs.map((one, at) => [at, { x: one.x.map((value) => value / size), values: one.values }]));
    for (const chart of charts) chart.show(answers);
    tell(found);
    clearTimeout(timer);
    timer = setTimeout(() => drawing.again(), reading ? 0 : 15000);
  }

  const drawing = paced(draw, 500);
  names().catch((error) => { state.textContent = error.message; });
  return { update() {}, close() { closed = true; clearTimeout(timer); drawing.close(); for (const chart of charts) chart.close(); } };
}
