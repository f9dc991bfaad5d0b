// Whether long answers are trained as often as short ones: histograms of answer lengths by their end, below each other on one axis.
import { box, element, number, svg, table } from "./tools.js";

const BAR = 10, HEIGHT = 44;
const KINDS = { finished: "finished", cut: "cut, never stored", trained: "trained", dropped: "dropped" };

function bars(line, at, bounds, greatest) {
  const title = `${KINDS[line.name]}: ${number(line.number)} answers`;
  const drawing = svg("svg", { class: "histogram", viewBox: `0 0 ${BAR * bounds.length} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title });
  line.shares.forEach((share, place) => {
    const [least, most] = bounds[place], height = (HEIGHT * share) / greatest;
    const one = svg("rect", { x: BAR * place + 1, width: BAR - 2, y: HEIGHT - height, height, class: `f${at}` });
    one.append(svg("title", {}, `${least === most ? number(least) : most === null ? `${number(least)} and more` : `${number(least)} to ${number(most)}`} tokens: ${number(100 * share, 3)} % of the ${line.name}`));
    drawing.append(one);
  });
  return drawing;
}

export function lengths({ bounds, lines, said }) {
  if (!lines.length) return "";
  const greatest = Math.max(...lines.flatMap((line) => line.shares));
  const rows = lines.map((line, at) => [KINDS[line.name], number(line.number), number(line.p50, 3), number(line.p95, 3), bars(line, at, bounds, greatest)]);
  const axis = element("p", { class: "soft between" }, element("span", {}, `${number(bounds[0][0])} tokens`), element("span", {}, `${number(bounds[bounds.length - 1][0])} tokens and more`));
  return box("Answer lengths by their end", element("p", {}, said),
    table(["answers", "number", "median", "p95", axis], rows, [1, 2, 3]));
}
