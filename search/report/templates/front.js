// The figures of multi-objective studies: the Pareto front in two metrics, and the hypervolume over epochs.

const onFront = new Set(data.front.trials);

// Worse values of a metric come later.
const orders = data.front.metrics.map(({ maximize }) => (a, b) => (maximize ? b - a : a - b));

// The non-dominated trials in two metrics, the best by the second first.
function nonDominated(ended, i, j) {
  const sorted = [...ended].sort((a, b) => orders[j](a.values[j], b.values[j]) || orders[i](a.values[i], b.values[i]));
  const found = [];
  for (const t of sorted) {
    if (!found.length || orders[i](t.values[i], found[found.length - 1].values[i]) < 0) found.push(t);
  }
  return found;
}

// The range of a metric with its bounds, except bounds far from all values.
function reach(drawn, k) {
  const bounds = data.front.bounds.filter((bound) => bound.metric === k);
  const values = drawn.map((t) => t.values[k]);
  const { low, high } = range(values, orders[k]);
  const near = bounds.map((bound) => bound.limit).filter((limit) => limit > low - (high - low) / 2 && limit < high + (high - low) / 2);
  return { ...range([...values, ...near], orders[k]), bounds };
}

function chosen(id, otherwise) {
  const select = document.getElementById(id);
  return select ? Number(select.value) : otherwise;
}

function front(host) {
  const i = chosen("across", 0), j = chosen("up", 1);
  const drawn = data.trials.filter((t) => (t.state === "complete" || t.state === "pruned") && t.values.length && t.values[i] !== null && t.values[j] !== null);
  if (!drawn.length) return nothing(host);
  const xs = reach(drawn, i), ys = reach(drawn, j);
  const { svg, x, y, box } = frame(host, [xs.low, xs.high], ys, data.front.metrics[i].name, { yname: data.front.metrics[j].name, fit: () => true });
  const at = (t) => [x(xs.keep(t.values[i])), y(ys.keep(t.values[j]))];
  const named = limits(svg, box, { x, y, xs, ys });
  stairs(svg, nonDominated(drawn.filter((t) => t.state === "complete" && !t.broken.length), i, j).map(at), {
    x: data.front.metrics[i].maximize ? box.left : box.right,
    y: data.front.metrics[j].maximize ? box.bottom : box.top,
  });
  const rank = (t) => (onFront.has(t.number) ? 2 : t.state === "complete" ? 1 : 0);
  const marks = [];
  for (const t of [...drawn].sort((a, b) => rank(a) - rank(b))) {
    const [left, top] = at(t);
    dot(svg, t, left, top, ["faint", "", "best"][rank(t)], rank(t) === 2 ? 6 : 4);
    const lines = data.front.metrics.map(({ name }, k) => `${name} ${t.values[k] === null ? "no finite number" : shown(t.values[k])}`);
    if (onFront.has(t.number)) lines.unshift("on the Pareto front");
    marks.unshift({ x: left, y: top, trial: t.number, lines });
  }
  for (const [attributes, text] of named) add(svg, "text", { ...attributes, class: "halo" }, clipped(text, 30)); // above all else
  watch(svg, among(marks));
}

// Draws the bounds and returns their labels.
function limits(svg, box, { x, y, xs, ys }) {
  const within = ({ bounds, low, high }) => bounds.filter(({ limit }) => limit >= low && limit <= high);
  const texts = [];
  for (const { limit, text } of within(xs)) {
    add(svg, "path", { class: "path bound", d: path([[x(limit), box.top], [x(limit), box.bottom]]) });
    const left = x(limit) > (box.left + box.right) / 2;
    texts.push([{ x: x(limit) + (left ? -5 : 5), y: box.top - 4, "text-anchor": left ? "end" : "start" }, text]);
  }
  for (const { limit, text } of within(ys)) {
    add(svg, "path", { class: "path bound", d: path([[box.left, y(limit)], [box.right, y(limit)]]) });
    texts.push([{ x: box.right, y: y(limit) - 5, "text-anchor": "end" }, text]);
  }
  return texts;
}

// The boundary of the dominated region: steps between the points of the front, extended to the worse sides of the frame.
function stairs(svg, points, worse) {
  if (!points.length) return;
  const steps = [[worse.x, points[0][1]]];
  for (const [left, top] of points) steps.push([steps[steps.length - 1][0], top], [left, top]);
  steps.push([points[points.length - 1][0], worse.y]);
  add(svg, "path", { class: "path best", d: path(steps) });
}

function volume(host) {
  const { epochs, points } = data.volume;
  const most = Math.max(1, ...points.map(([, share]) => share));
  const ys = { low: 0, high: most * 1.04, keep: (v) => v, cut: 0 };
  const { svg, x, y, box } = frame(host, [0, epochs], ys, "epochs of all trials", { yname: "share of the final hypervolume" });
  const steps = [[x(0), y(0)]], marks = [];
  for (const [count, share, trial, epoch] of points) {
    steps.push([x(count), steps[steps.length - 1][1]], [x(count), y(share)]);
    const lines = [`${(100 * share).toFixed(1)} % of the final hypervolume, with its epoch ${epoch}`, `after ${count} of ${epochs} epochs`];
    marks.push({ x: x(count), y: y(share), trial, lines });
  }
  add(svg, "path", { class: "path best", d: path([...steps, [box.right, steps[steps.length - 1][1]]]) });
  if (points.length <= 60) for (const mark of marks) add(svg, "circle", { class: "dot best", "data-trial": mark.trial, cx: mark.x, cy: mark.y, r: 3.5 });
  watch(svg, among(marks));
}

show({ front, volume });
for (const id of ["across", "up"]) {
  document.getElementById(id)?.addEventListener("change", () => front(document.getElementById("front")));
}
