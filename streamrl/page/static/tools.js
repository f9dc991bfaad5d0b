// Small things that all views need.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return made;
}

export function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// The server gave no answer, or one that says why not. Other errors are this page's own, and nothing hides them.
export class Unanswered extends Error {}

export async function get(path) {
  let ok, text, status;
  try {
    const answer = await fetch(path);
    ({ ok, status } = answer);
    text = await answer.text();
  } catch (error) {
    throw new Unanswered(`the page's server does not answer: ${error.message}`);
  }
  if (!ok) throw new Unanswered(text.trim() || `status ${status}`);
  return JSON.parse(text);
}

// What `work` could not have from the server, told below the head until it has it.
function tellFailed(text) {
  const line = document.getElementById("failed");
  line.hidden = !text;
  line.textContent = text && `this view is tried again: ${text}`;
}

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const rounded = Number.isInteger(value) ? value : Number(value.toPrecision(digits));
  return Math.abs(rounded) >= 1000 && Math.abs(rounded) < 1e15 ? rounded.toLocaleString("en") : String(rounded);
}

export function clock(seconds) {
  return seconds ? new Date(seconds * 1000).toLocaleTimeString() : "–";
}

// Seconds as people say them: 0:45, 12:30, 1:05:00.
export function lasting(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.floor(seconds), two = (count) => String(count).padStart(2, "0");
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

const kind = (numeric, at) => (numeric.includes(at) ? "num" : "text");

export function cells(rows, numeric = []) {
  return rows.map((row) => element("tr", {}, ...row.map((cell, at) => element("td", { class: kind(numeric, at) }, cell ?? "–"))));
}

export function table(heads, rows, numeric = []) {
  const head = element("tr", {}, ...heads.map((title, at) => element("th", { scope: "col", class: kind(numeric, at) }, title)));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...cells(rows, numeric)));
}

export function box(title, ...children) {
  return element("section", { class: "box" }, element("h2", {}, title), ...children);
}

const RETRY = 5000;

// Calls `work` at once and again when asked to, or when the server gave no answer; one at a time and at most every `every` milliseconds,
// but where it is asked for `now`.
export function paced(work, every = 5000) {
  let running = false, again = false, soon = false, closed = false, last = 0, timer = 0;
  async function go(now = false) {
    if (closed) return;
    if (running) { again = true; soon ||= now; return; }
    const wait = now ? 0 : last + every - Date.now();
    if (wait > 0) { clearTimeout(timer); timer = setTimeout(go, wait); return; }
    running = true;
    last = Date.now();
    try {
      await work();
      if (!closed) tellFailed("");
    } catch (error) {
      if (!(error instanceof Unanswered)) throw error;
      if (closed) return;
      again = true;
      last = Date.now() + Math.max(0, RETRY - every);
      tellFailed(error.message);
    } finally { running = false; }
    if (again) { const at = soon; again = soon = false; go(at); }
  }
  go();
  return { again: go, close() { closed = true; clearTimeout(timer); tellFailed(""); } };
}
