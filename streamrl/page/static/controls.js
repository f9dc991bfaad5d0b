// How charts are drawn, as the reader has chosen; the browser remembers it for all views and runs.
import { element } from "./tools.js";

const KEY = "streamrl.drawn";
const AXES = { "": "usual x axis", version: "by version", step: "by step", tokens: "by tokens trained", time_s: "by time" };
const MEANS = { "": "usual smoothing", ...Object.fromEntries(["1", "5", "20", "100"].map((most) => [`${most} rows`, most === "1" ? "not smoothed" : `mean of ${most}`])) };
const drawn = { x: "", smooth: "", log: false };

try { Object.assign(drawn, JSON.parse(localStorage.getItem(KEY))); } catch { /* a browser that keeps nothing */ }
if (!(drawn.x in AXES)) drawn.x = "";
if (!(drawn.smooth in MEANS)) drawn.smooth = "";

// Controls of smoothing, scale and, but for a view that has its own, the x axis; `changed` is told after each change.
export function controls(changed, { axes = true } = {}) {
  const choice = (name, label, values) => element("select", { name, "aria-label": label },
    ...Object.entries(values).map(([value, said]) => element("option", { value, selected: String(drawn[name]) === value }, said)));
  const x = choice("x", "X axis", AXES), smooth = choice("smooth", "Smoothing", MEANS);
  const log = element("input", { type: "checkbox", checked: drawn.log });
  const take = () => {
    Object.assign(drawn, { x: x.value, smooth: smooth.value, log: log.checked });
    try { localStorage.setItem(KEY, JSON.stringify(drawn)); } catch { /* as above */ }
    changed();
  };
  for (const one of [x, smooth, log]) one.addEventListener("change", take);
  return element("div", { class: "bar" }, ...(axes ? [x] : []), smooth, element("label", {}, log, " log scale"));
}

// What a chart of this axis and these options is drawn with.
export const chosen = (x, options = {}) => [drawn.x || x, { ...options, smooth: parseInt(drawn.smooth) || options.smooth || 1, log: drawn.log && !options.stacked }];
