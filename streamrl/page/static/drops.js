// What was sampled and not trained, and messages that could not be used.
import { Chart, fill } from "./charts.js";
import { box, clock, element, get, number, paced, table } from "./tools.js";

const PREFIX = "rollouts/dropped_total/";

export function drops(place, run) {
  const room = element("div", { class: "charts" });
  const lists = element("div");
  place.append(room, lists);
  const charts = [];
  let known = "";

  async function draw() {
    const reasons = (run.tables.batch || []).filter((name) => name.startsWith(PREFIX));
    if (!charts.length || reasons.join() !== known) {
      known = reasons.join();
      for (const chart of charts.splice(0)) chart.close();
      room.replaceChildren();
      const series = reasons.map((name) => ({ table: "batch", name, label: name.slice(PREFIX.length) }));
      charts.push(new Chart(room, "Dropped rollouts a batch, by reason", series));
    }
    await fill(charts, run);
    const [dropped, letters] = await Promise.all([get("api/drops"), get("api/letters")]);
    const counts = {};
    for (const one of dropped) counts[one.reason] = (counts[one.reason] || 0) + Math.max(1, one.rollouts.length);
    const sums = Object.entries(counts).sort((a, b) => b[1] - a[1]).map(([reason, count]) => `${reason} ${number(count)}`).join(", ");
    lists.replaceChildren(
      box("Dropped with the newest batches", dropped.length
        ? element("div", {}, element("p", { class: "soft" }, `${sums} (rollouts)`), table(["before version", "reason", "task", "rollouts", "sequence", "detail"],
            dropped.slice(0, 200).map((one) => [one.version, one.reason, one.task, one.rollouts.join(", "), one.sequence || "–", one.detail]), [2, 4]))
        : element("p", { class: "soft" }, "nothing was")),
      box("Dead letters", letters.length
        ? table(["stored at", "sequence", "subject", "task", "bytes", "reason"],
            letters.map((one) => [clock(one.time_s), one.sequence, one.subject, one.task, number(one.num_bytes), one.reason]), [1, 3, 4])
        : element("p", { class: "soft" }, "there are none; `streamrl dead` publishes one again")),
    );
  }

  const drawing = paced(draw, 5000);
  let seen = run.changes;
  return {
    update() { if (run.changes !== seen) { seen = run.changes; drawing.again(); } },
    close() { drawing.close(); for (const chart of charts) chart.close(); },
  };
}
