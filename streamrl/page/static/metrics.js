// Every metric there is, of the run or of one worker.
import { Chart, fill } from "./charts.js";
import { chosen, controls } from "./controls.js";
import { element, number, paced } from "./tools.js";

const MOST = 24;

export function metrics(place, run) {
  const search = element("input", { type: "search", placeholder: "name, such as staleness", "aria-label": "Metrics whose name contains" });
  const whose = element("select", { "aria-label": "Of whom" });
  const count = element("span", { class: "soft", role: "status" });
  const room = element("div", { class: "charts" });
  place.append(element("div", { class: "bar" }, search, whose, count), controls(() => choose()), room);
  const charts = [];

  function tables() {
    const names = Object.keys(run.tables).sort();
    const chosen = whose.value || "batch";
    whose.replaceChildren(...names.map((name) => element("option", { value: name, selected: name === chosen }, name)));
  }

  function choose() {
    for (const chart of charts.splice(0)) chart.close();
    room.replaceChildren();
    const table = whose.value || "batch";
    const found = (run.tables[table] || []).filter((name) => name.includes(search.value.trim()));
    count.textContent = found.length > MOST ? `${found.length} metrics, the first ${MOST} are shown` : `${found.length} metrics`;
    for (const name of found.slice(0, MOST)) {
      const { unit, meaning } = run.metrics[name] || {};
      const chart = new Chart(room, `${name}${unit && unit !== "1" ? `, ${unit}` : ""}`, [{ table, name, label: name.split("/").pop() }], ...chosen(table === "batch" ? "version" : "time_s"));
      chart.place.title = meaning || "";
      charts.push(chart);
    }
    drawing.again(true);
  }

  const drawing = paced(() => fill(charts, run), 1000);
  tables();
  choose();
  search.addEventListener("input", choose);
  whose.addEventListener("change", choose);
  let seen = run.changes;
  return {
    update() { if (run.changes !== seen) { seen = run.changes; drawing.again(); } },
    close() { drawing.close(); for (const chart of charts) chart.close(); },
  };
}
