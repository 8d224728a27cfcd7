// Parts of the report's figures: data, scales, frames and tooltips. All colours are in the style sheet, so that figures
// follow the reader's theme. Names and values of users become text nodes, never markup. The page includes this file,
// report.js and, for multi-objective studies, front.js in one function.
const data = JSON.parse(document.getElementById("data").textContent);
const trials = new Map(data.trials.map((trial) => [trial.number, trial]));
const complete = data.trials.filter((trial) => trial.state === "complete" && trial.value !== null);
const better = (a, b) => (data.maximize ? b - a : a - b);
const best = trials.get(data.chosen); // by the first metric
const tip = document.getElementById("tip");
const HEIGHT = 300;
const APART = 7; // pixels between forecasts

function add(parent, tag, attributes = {}, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function shown(value) {
  return typeof value !== "number" || Number.isInteger(value) ? String(value) : String(parseFloat(value.toPrecision(4)));
}

function clipped(text, letters) {
  return text.length <= letters ? text : `${text.slice(0, Math.max(letters - 1, 1))}…`;
}

// --- scales ---

function scale(low, high, from, to, log = false) {
  const f = log ? Math.log10 : (v) => v;
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const at = (v) => from + ((f(v) - f(low)) / (f(high) - f(low))) * (to - from);
  return Object.assign(at, { low, high, ticks: (count) => (log ? powers(low, high, count) : ticks(low, high, count)) });
}

function ticks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(parseFloat((i * step).toPrecision(10)));
  return found;
}

function powers(low, high, count) {
  const found = [];
  for (let e = Math.ceil(Math.log10(low) - 1e-9); 10 ** e <= high * (1 + 1e-9); e++) found.push(10 ** e);
  if (found.length < 2) return [low, high];
  const stride = Math.ceil(found.length / count);
  return found.filter((_, i) => i % stride === 0);
}

// The range of values without bad outliers, which would compress the good values into a line.
function range(values, order = better) {
  const sorted = [...values].sort(order);
  const [good, bad] = [sorted[0], sorted[sorted.length - 1]];
  const most = sorted[Math.floor((sorted.length - 1) * 0.9)];
  const end = Math.abs(bad - good) > 3 * Math.abs(most - good) && most !== good ? most + (most - good) * 0.5 : bad;
  const pad = Math.abs(end - good) * 0.05;
  const [low, high] = [Math.min(good, end) - pad, Math.max(good, end) + pad];
  return { low, high, keep: (v) => Math.min(Math.max(v, low), high), cut: values.filter((v) => v < low || v > high).length };
}

// --- a figure's frame ---

function open(host, height) {
  host.replaceChildren();
  const width = Math.max(host.clientWidth, 200);
  return [add(host, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": host.dataset.label }), width];
}

function frame(host, xs, ys, xname, { beside = 0, yname = data.metric, fit = Number.isInteger } = {}) {
  const [svg, width] = open(host, HEIGHT);
  const box = { left: 50, right: width - 12, top: 26, bottom: HEIGHT - 40 };
  const x = scale(xs[0], xs[1], box.left, box.right - beside), y = scale(ys.low, ys.high, box.bottom, box.top);
  for (const tick of y.ticks(6)) {
    add(svg, "line", { class: "grid", x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) });
    add(svg, "text", { x: box.left - 8, y: y(tick) + 4, "text-anchor": "end" }, shown(tick));
  }
  for (const tick of x.ticks(Math.max(Math.floor(width / 80), 2)).filter(fit)) {
    add(svg, "text", { x: x(tick), y: box.bottom + 18, "text-anchor": "middle" }, shown(tick));
  }
  add(svg, "line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom });
  add(svg, "text", { x: (box.left + box.right) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, xname);
  const cut = ys.cut ? ` (${ys.cut} worse ${ys.cut === 1 ? "value" : "values"} at the edge)` : "";
  add(svg, "text", { x: 4, y: 12 }, clipped(yname, 40) + cut);
  return { svg, x, y, box };
}

function path(points) {
  return points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

// --- tooltips ---

let hot;

function heat(number) {
  if (number === hot) return;
  for (const node of document.querySelectorAll(".hot")) node.classList.remove("hot");
  hot = number;
  if (number !== undefined) for (const node of document.querySelectorAll(`[data-trial="${number}"]`)) node.classList.add("hot");
}

function trialOf(node) {
  const row = node?.closest("tr[data-trial]");
  return row ? Number(row.dataset.trial) : undefined;
}

// Highlights the trial of the focused row only.
function rest() {
  heat(trialOf(document.activeElement));
}

function line(parent, tag, text) {
  const node = document.createElement(tag);
  node.textContent = text;
  parent.append(node);
}

function showTip(mark, event) {
  const trial = trials.get(mark.trial);
  tip.replaceChildren();
  line(tip, "b", `trial ${mark.trial}${trial ? ` · ${trial.state}` : ""}`);
  for (const text of mark.lines) line(tip, "span", text);
  if (trial && trial.reason) line(tip, "span", trial.reason);
  if (trial && trial.broken.length && !trial.reason.includes("out of bounds")) {
    line(tip, "span", `out of bounds: ${trial.broken.join(", ")}`);
    tip.lastChild.className = "broken";
  }
  if (trial && data.names.length) {
    const list = document.createElement("dl");
    data.names.forEach((name, i) => {
      if (trial.params[i] === null) return;
      line(list, "dt", clipped(name, 32));
      line(list, "dd", clipped(shown(trial.params[i]), 60));
    });
    tip.append(list);
  }
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 16 + width < innerWidth ? event.clientX + 16 : event.clientX - 16 - width;
  const top = event.clientY + 16 + height < innerHeight ? event.clientY + 16 : event.clientY - 16 - height;
  tip.style.transform = `translate(${Math.max(8, Math.min(left, innerWidth - width - 8))}px, ${Math.max(8, top)}px)`;
}

function hide() {
  tip.hidden = true;
  rest();
}

function watch(svg, nearest) {
  const look = (event) => {
    const corner = svg.getBoundingClientRect();
    const mark = nearest(event.clientX - corner.left, event.clientY - corner.top);
    if (!mark) return hide();
    heat(mark.trial);
    showTip(mark, event);
  };
  svg.addEventListener("pointermove", look);
  svg.addEventListener("pointerdown", look);
  svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hide());
  svg.addEventListener("click", (event) => {
    look(event);
    const row = document.querySelector(`#trials tr[data-trial="${hot}"]`);
    if (row && event.detail === 2) row.scrollIntoView({ block: "center" });
  });
}

function among(marks, reach = 32) {
  return (x, y) => {
    let found, least = reach * reach;
    for (const mark of marks) {
      const far = (mark.x - x) ** 2 + (mark.y - y) ** 2;
      if (far < least) [found, least] = [mark, far];
    }
    return found;
  };
}

// --- drawing ---

// A trial as a dot, or as a cross if it is out of bounds.
function dot(svg, trial, x, y, kind, r = 4) {
  const own = { "data-trial": trial.number };
  if (!trial.broken.length) return add(svg, "circle", { class: `dot ${kind}`, cx: x, cy: y, r, ...own });
  const d = `M${x - r} ${y - r}l${2 * r} ${2 * r}M${x - r} ${y + r}l${2 * r} ${-2 * r}`;
  return add(svg, "path", { class: `cross ${trial.state === "complete" ? "" : "faint"}`, d, ...own });
}

function nothing(host) {
  host.replaceChildren();
  line(host, "p", "No values reported yet.");
  host.firstChild.className = "dim";
  if (host.nextElementSibling) host.nextElementSibling.hidden = true; // the legend
}

// Draws figures into the elements with their ids, again after each change of width.
function show(figures) {
  for (const [id, draw] of Object.entries(figures)) {
    const host = document.getElementById(id);
    if (!host) continue;
    let width;
    new ResizeObserver(() => {
      if (host.clientWidth !== width) draw(host, (width = host.clientWidth));
    }).observe(host);
  }
}
