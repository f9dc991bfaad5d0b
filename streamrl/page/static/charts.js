// A chart of some metrics of one table, thinned on the server and drawn by uPlot.
import uPlot from "./vendor/uPlot.esm.js";
import { element, get, number } from "./tools.js";

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const HEIGHT = 190;

// A line that is flat has room above and below it.
function range(plot, least, most) {
  if (least === null || most === null) return [0, 1];
  if (least !== most) return uPlot.rangeNum(least, most, 0.1, true);
  const room = Math.abs(least) / 10 || 1;
  return [least - room, most + room];
}

const SECONDS = uPlot.fmtDate("{HH}:{mm}:{ss}"), MINUTES = uPlot.fmtDate("{HH}:{mm}"), DAYS = uPlot.fmtDate("{YYYY}-{MM}-{DD}");

// Labels of a time axis whose ticks are `step` seconds apart: local time, and the day where it begins.
function clock(plot, ticks, axis, space, step) {
  return ticks.map((tick) => {
    const at = new Date(tick * 1000), midnight = !(at.getHours() || at.getMinutes() || at.getSeconds());
    return (midnight ? DAYS : step < 60 ? SECONDS : MINUTES)(at);
  });
}

// Each line with those before it below; where one is missing all are.
function onTop([x, ...lines]) {
  const sums = x.map(() => 0);
  return [x, ...lines.map((line) => line.map((value, at) => (value === null ? null : (sums[at] += value))))];
}

// series: [{ table, name, label, rate }] - `rate`: an amount of a row, drawn a second.
// `edge`: the bound of an interval, drawn thin. `smooth`: each value is the mean over so many rows; evaluations stay as they are.
// `log`: values above 0 on a logarithmic scale, and how many there are beside them.
// `stepped`: a value holds until the next one. `stacked`: shares that add up to one, drawn on top of each other, thinned to their means.
export class Chart {
  constructor(place, title, series, x = "version", { stacked = false, stepped = false, smooth = 1, log = false } = {}) {
    this.paths = stepped ? uPlot.paths.stepped({ align: 1 }) : undefined;
    this.series = series;
    this.x = x;
    this.stacked = stacked;
    this.smooth = stacked ? 1 : smooth;
    this.log = log;
    this.plot = null;
    this.room = element("div", { class: "plot" });
    this.none = element("p", { class: "none" }, "no values yet");
    this.hidden = element("p", { class: "soft", hidden: true });
    const rows = series.some((one) => one.table === "batch") ? "batches" : "rows";
    const mean = this.smooth > 1 ? element("span", { class: "soft" }, ` mean of ${this.smooth} ${rows}`) : "";
    this.place = element("section", { class: "chart", "aria-label": title }, element("h2", {}, title, mean), this.none, this.room, this.hidden);
    place.append(this.place);
    this.observer = new ResizeObserver(() => this.plot && this.plot.setSize({ width: this.room.clientWidth, height: HEIGHT }));
    this.observer.observe(this.room);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.repaint = () => { this.#end(); this.data && this.#draw(this.data); };
    this.scheme.addEventListener("change", this.repaint);
  }

  // `answers`: by table, what /api/series says.
  show(answers) {
    const parts = this.series.map((one) => answers[one.table] && { ...one, x: answers[one.table].x, y: answers[one.table].values[one.name] });
    let below = 0;
    for (const part of this.log ? parts : []) {
      if (!part || !part.y) continue;
      below += part.y.filter((value) => value !== null && value <= 0).length;
      part.y = part.y.map((value) => (value > 0 ? value : null));
    }
    this.hidden.hidden = !below;
    this.hidden.textContent = `a log scale has no place for values of 0 or less: ${number(below)} points are not drawn`;
    const present = parts.filter((part) => part && part.y && part.y.some((value) => (this.stacked ? value > 0 : value !== null)));
    this.none.hidden = present.length > 0;
    this.room.hidden = present.length === 0;
    if (!present.length) return;
    const tables = new Set(present.map((part) => part.table));
    let joined = tables.size === 1
      ? [present[0].x, ...present.map((part) => part.y)]
      : uPlot.join(present.map((part) => [part.x, part.y]));
    if (this.stacked) {
      const known = joined[0].map((_, at) => joined.slice(1).some((line) => line[at] !== null)); // a short window may have no report
      joined = joined.map((line) => line.filter((_, at) => known[at]));
    }
    const raw = joined;
    if (this.stacked) joined = onTop(joined);
    this.data = { values: joined, raw, labels: present.map((part) => part.label), edges: present.map((part) => part.edge), sparse: tables.size > 1 };
    if (this.plot && this.drawn === this.data.labels.join("\n")) this.plot.setData(joined);
    else { this.#end(); this.#draw(this.data); }
  }

  #draw({ values, labels, edges, sparse }) {
    const stacked = this.stacked;
    const axis = { stroke: style("--soft"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line") } };
    const time = this.x === "time_s", over = this.x === "tokens" ? "tokens trained" : this.x;
    const lines = labels.map((label, at) => ({
      label, stroke: style(`--s${at % 9}`), width: stacked ? 0.5 : edges[at] ? 0.75 : 1.5, dash: edges[at] ? [4, 4] : undefined, spanGaps: sparse, paths: this.paths, fill: stacked ? style(`--s${at % 9}`) : undefined,
      value: (plot, value, series, row) => number(stacked && row !== null ? this.data.raw[series][row] : stacked ? null : value, stacked ? 3 : 4),
      points: { show: !stacked && values[at + 1].filter((one) => one !== null && one !== undefined).length < (edges[at] ? 2 : 40) },
    }));
    this.drawn = labels.join("\n");
    this.plot = new uPlot(
      {
        width: this.room.clientWidth || 400, height: HEIGHT, scales: { x: { time }, y: this.log ? { distr: 3 } : { range: stacked ? [0, 1] : range } },
        bands: stacked ? labels.slice(1).map((_, at) => ({ series: [at + 2, at + 1] })) : [],
        series: [{ label: time ? "time" : over, value: time ? "{HH}:{mm}:{ss}" : (plot, value) => number(value) }, ...lines],
        axes: [time ? { ...axis, space: 70, values: clock } : axis, { ...axis, size: 58, values: (plot, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))) }],
        cursor: { sync: { key: this.x } },
      },
      values,
      this.room,
    );
  }

  #end() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
  }

  close() {
    this.#end();
    this.observer.disconnect();
    this.scheme.removeEventListener("change", this.repaint);
  }
}

// All charts of a view in few requests: one for each table, axis and smoothing.
export async function fill(charts, run, last = 0) {
  const wanted = {};
  const key = (chart, table) => JSON.stringify([table, chart.x, chart.stacked, table === "evaluation" ? 1 : chart.smooth]);
  for (const chart of charts)
    for (const one of chart.series)
      if ((run.tables[one.table] || []).includes(one.name)) {
        const { names, rates } = (wanted[key(chart, one.table)] ||= { names: new Set(), rates: new Set() });
        names.add(one.name);
        if (one.rate) rates.add(one.name);
      }
  const answers = {};
  await Promise.all(Object.entries(wanted).map(async ([key, { names, rates }]) => {
    const [table, x, stacked, smooth] = JSON.parse(key);
    const means = stacked || smooth > 1;
    const query = new URLSearchParams({ table, x, names: [...names].join(","), points: means ? 250 : 1000, last, thin: means ? "mean" : "extremes", smooth, rates: [...rates].join(",") });
    answers[key] = await get(`api/series?${query}`);
  }));
  for (const chart of charts) chart.show(Object.fromEntries(chart.series.map(({ table }) => [table, answers[key(chart, table)]])));
}
