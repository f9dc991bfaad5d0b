// A chart of some metrics of one table, thinned on the server and drawn by uPlot.
import uPlot from "/static/vendor/uPlot.esm.js";
import { element, get, number } from "/static/tools.js";

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const HEIGHT = 190;

// A line that is flat has room above and below it.
function range(plot, least, most) {
  if (least === null || most === null) return [0, 1];
  if (least !== most) return uPlot.rangeNum(least, most, 0.1, true);
  const room = Math.abs(least) / 10 || 1;
  return [least - room, most + room];
}

// series: [{ table, name, label, per }] - `per` divides by seconds, for amounts of a window.
export class Chart {
  constructor(place, title, series, x = "version") {
    this.series = series;
    this.x = x;
    this.plot = null;
    this.room = element("div", { class: "plot" });
    this.none = element("p", { class: "none" }, "no values yet");
    this.place = element("section", { class: "chart", "aria-label": title }, element("h2", {}, title), this.none, this.room);
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
    const present = parts.filter((part) => part && part.y && part.y.some((value) => value !== null));
    this.none.hidden = present.length > 0;
    this.room.hidden = present.length === 0;
    if (!present.length) return;
    const tables = new Set(present.map((part) => part.table));
    const scaled = (part) => (part.per ? part.y.map((value) => (value === null ? null : value / part.per)) : part.y);
    const joined = tables.size === 1
      ? [present[0].x, ...present.map(scaled)]
      : uPlot.join(present.map((part) => [part.x, scaled(part)]));
    this.data = { values: joined, labels: present.map((part) => part.label), sparse: tables.size > 1 };
    if (this.plot && this.drawn === this.data.labels.join("\n")) this.plot.setData(joined);
    else { this.#end(); this.#draw(this.data); }
  }

  #draw({ values, labels, sparse }) {
    const axis = { stroke: style("--soft"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line") } };
    const time = this.x === "time_s";
    const lines = labels.map((label, at) => ({
      label, stroke: style(`--s${at % 8}`), width: 1.5, spanGaps: sparse,
      value: (plot, value) => number(value), points: { show: values[at + 1].filter((one) => one !== null && one !== undefined).length < 40 },
    }));
    this.drawn = labels.join("\n");
    this.plot = new uPlot(
      {
        width: this.room.clientWidth || 400, height: HEIGHT, scales: { x: { time }, y: { range } },
        series: [{ label: time ? "time" : this.x, value: time ? "{HH}:{mm}:{ss}" : (plot, value) => number(value) }, ...lines],
        axes: [axis, { ...axis, size: 58, values: (plot, ticks) => ticks.map((tick) => number(tick)) }],
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

// All charts of a view in few requests: one for each table.
export async function fill(charts, run, last = 0) {
  const wanted = {};
  for (const chart of charts)
    for (const one of chart.series)
      if ((run.tables[one.table] || []).includes(one.name)) (wanted[`${chart.x}|${one.table}`] ||= new Set()).add(one.name);
  const answers = {};
  await Promise.all(Object.entries(wanted).map(async ([key, names]) => {
    const [x, table] = [key.slice(0, key.indexOf("|")), key.slice(key.indexOf("|") + 1)];
    const query = new URLSearchParams({ table, x, names: [...names].join(","), points: 1000, last });
    (answers[x] ||= {})[table] = await get(`/api/series?${query}`);
  }));
  for (const chart of charts) chart.show(answers[chart.x] || {});
}
