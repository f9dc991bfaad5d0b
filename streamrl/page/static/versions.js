// A line for each engine: what it serves against what was published, and whether it is what was trained.
import { Chart, fill } from "./charts.js";
import { box, clock, element, get, number, paced, table } from "./tools.js";

const MOST = 8; // engines in a chart
const words = { same: "= ledger", other: "not the ledger's", unknown: "no digest to compare" };

export function versions(place, run) {
  const lines = element("div"), hidden = element("p", { class: "soft" });
  const room = element("div", { class: "charts" });
  const swaps = element("div");
  place.append(lines, hidden, room, swaps);
  const charts = [];
  let known = "", served = null;

  function verdict(counts) {
    if (counts.other) return element("span", { class: "bad" }, `${counts.other} of ${counts.same + counts.other} are not the ledger's`);
    return element("span", { class: counts.same ? "good" : "soft" }, counts.same ? `all ${number(counts.same)} = ledger` : words.unknown);
  }

  async function draw() {
    const [{ engines, trained }, over] = await Promise.all([get("api/versions"), get("api/served")]);
    const rows = engines.map(({ engine, counts, commits }) => [
      engine, commits.length ? commits[0].version : "–", trained || "–",
      number(counts.same + counts.other + counts.unknown), verdict(counts),
      number(commits.length ? commits[0].lag_s : null, 3), number(commits.length ? commits[0].commit_ms : null, 3),
    ]);
    lines.replaceChildren(box("Engines", engines.length
      ? table(["engine", "serves", "trained", "versions taken", "served digest", "publish to commit, s", "swap, ms"], rows, [3, 5, 6])
      : element("p", { class: "soft" }, "no engine has taken a version yet")));
    // Those that took a version last come first: names of engines change with each start.
    const newest = Object.fromEntries(engines.map(({ engine, commits }) => [`window:${engine}`, commits.length ? commits[0].time_s : 0]));
    const names = Object.keys(run.tables).filter((name) => name.startsWith("window:engine")).sort((a, b) => (newest[b] || 0) - (newest[a] || 0) || (a < b ? -1 : 1));
    const drawn = names.slice(0, MOST).sort();
    const more = Math.max(over.hidden, names.length - drawn.length);
    hidden.textContent = more > 0 ? `The charts have the ${MOST} engines that took a version last; ${more} more are not drawn.` : "";
    const lined = Object.keys(over.lines);
    if (JSON.stringify([lined, drawn]) !== known) {
      known = JSON.stringify([lined, drawn]);
      for (const chart of charts.splice(0)) chart.close();
      if (served) served.close();
      room.replaceChildren();
      served = new Chart(room, "Version served, and trained", lined.map((name) => ({ table: name, name: "version", label: name.replace("commits:", "").replace("ledger", "trained") })), "time_s", { stepped: true });
      const of = (metric) => drawn.map((name) => ({ table: name, name: metric, label: name.slice("window:".length) }));
      for (const [title, metric] of [["Versions behind", "lag/versions_behind"], ["Seconds from publication to commit", "lag/publish_to_commit_s"], ["Swap, ms", "engine/swap_ms"]])
        charts.push(new Chart(room, title, of(metric), "time_s"));
    }
    served.show(over.lines);
    await fill(charts, run);
    swaps.replaceChildren(...engines.map(({ engine, commits }) => box(`Newest swaps of ${engine}`, table(
      ["at", "version", "digest", "publish to commit, s", "staged in, s", "swap, ms"],
      commits.slice(0, 25).map((one) => [
        clock(one.time_s), one.version, element("span", { class: one.digest === "other" ? "bad" : one.digest === "same" ? "good" : "soft" }, words[one.digest]),
        number(one.lag_s, 3), number(one.stage_s, 3), number(one.commit_ms, 3),
      ]), [3, 4, 5]))));
  }

  const drawing = paced(draw);
  let seen = run.changes;
  return {
    update() { if (run.changes !== seen) { seen = run.changes; drawing.again(); } },
    close() { drawing.close(); if (served) served.close(); for (const chart of charts) chart.close(); },
  };
}
