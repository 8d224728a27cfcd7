// The figures that every report has, and the sorting of its tables.
// --- the figures ---

function history(host) {
  const points = data.trials.filter((t) => t.value !== null && (t.state === "complete" || t.state === "pruned"));
  if (!points.length) return nothing(host);
  const ys = range(points.map((t) => t.value));
  const last = Math.max(...data.trials.map((t) => t.number));
  const { svg, x, y, box } = frame(host, [-0.5, last + 0.5], ys, "trial");
  const steps = [];
  for (const [number, value] of data.best) {
    if (steps.length) steps.push([x(number), steps[steps.length - 1][1]]);
    steps.push([x(number), y(ys.keep(value))]);
  }
  if (steps.length) add(svg, "path", { class: "path best", d: path([...steps, [box.right, steps[steps.length - 1][1]]]) });
  const marks = points.map((t) => ({ x: x(t.number), y: y(ys.keep(t.value)), trial: t.number, lines: [`${data.metric} ${shown(t.value)}`] }));
  points.forEach((t, i) => {
    const kind = t === best ? "best" : t.state === "complete" ? "" : "hollow";
    dot(svg, t, marks[i].x, marks[i].y, kind, t === best ? 6 : 4);
  });
  watch(svg, among(marks));
}

function curves(host) {
  const drawn = data.trials.map((t) => [t, t.curve.filter(([, v]) => v !== null)]).filter(([, c]) => c.length);
  if (!drawn.length) return nothing(host);
  const ys = range([...drawn.flatMap(([, curve]) => curve.map(([, v]) => v)), ...data.forecasts.flatMap((f) => [f.value, f.low, f.high])]);
  const last = data.forecasts.length ? data.epochs : Math.max(2, ...drawn.map(([, curve]) => curve[curve.length - 1][0]));
  const { svg, x, y } = frame(host, [1, last], ys, "epoch", { beside: APART * data.forecasts.length });
  const rank = ([t]) => (t === best ? 2 : t.state === "complete" ? 1 : 0);
  const marks = [];
  for (const [t, curve] of drawn.sort((a, b) => rank(a) - rank(b))) {
    const points = curve.map(([epoch, value]) => [x(epoch), y(ys.keep(value))]);
    const kind = t === best ? "best" : t.state === "complete" ? "complete" : "";
    if (points.length > 1) add(svg, "path", { class: `path ${kind}`, "data-trial": t.number, d: path(points) });
    else add(svg, "circle", { class: `dot ${kind === "complete" ? "" : kind || "hollow"}`, "data-trial": t.number, cx: points[0][0], cy: points[0][1], r: 3 });
    for (const [epoch, value] of curve.filter(([epoch]) => t.pauses.includes(epoch))) {
      add(svg, "circle", { class: "dot pause", "data-trial": t.number, cx: x(epoch), cy: y(ys.keep(value)), r: 3.5 });
    }
    curve.forEach(([epoch, value], i) => marks.push({ x: points[i][0], y: points[i][1], trial: t.number, lines: [`epoch ${epoch}: ${data.metric} ${shown(value)}`] }));
  }
  ends(svg, x, (value) => y(ys.keep(value)), marks, new Map(drawn.map(([t, curve]) => [t.number, curve[curve.length - 1]])));
  watch(svg, among(marks));
}

// Forecasts of final values: side by side behind the last epoch, so that their intervals do not overlap.
function ends(svg, x, y, marks, lasts) {
  data.forecasts.forEach(({ trial, value, low, high }, i) => {
    const at = x(data.epochs) + APART * (i + 0.5), from = lasts.get(trial);
    if (!from) return;
    const own = { "data-trial": trial };
    add(svg, "path", { class: "path forecast", d: path([[x(from[0]), y(from[1])], [at, y(value)]]), ...own });
    add(svg, "path", { class: "path band", d: path([[at, y(low)], [at, y(high)]]), ...own });
    add(svg, "circle", { class: "dot forecast", cx: at, cy: y(value), r: 3.5, ...own });
    marks.push({ x: at, y: y(value), trial, lines: [`forecast ${data.metric} ${shown(value)}`, `90 % interval ${shown(low)} to ${shown(high)}`] });
  });
}

function spent(host) {
  const { epochs, best: found } = data.epoch_usage;
  if (!found.length) return nothing(host);
  const ys = range(found.map(([, value]) => value));
  const { svg, x, y, box } = frame(host, [0, epochs], ys, "epochs of all trials");
  const steps = [], marks = [];
  for (const [count, value, trial, epoch] of found) {
    if (steps.length) steps.push([x(count), steps[steps.length - 1][1]]);
    steps.push([x(count), y(ys.keep(value))]);
    marks.push({ x: x(count), y: y(ys.keep(value)), trial, lines: [`${data.metric} ${shown(value)} at its epoch ${epoch}`, `after ${count} of ${epochs} epochs`] });
  }
  add(svg, "path", { class: "path best", d: path([...steps, [box.right, steps[steps.length - 1][1]]]) });
  for (const mark of marks) add(svg, "circle", { class: "dot best", "data-trial": mark.trial, cx: mark.x, cy: mark.y, r: 4 });
  watch(svg, among(marks));
}

function parallel(host) {
  const height = 340, ends = [52, height - 18];
  const values = complete.map((t) => t.value);
  const axes = data.axes.map((axis) => {
    const own = complete.map((t) => t.params[axis.index]);
    if (!axis.choices) return { ...axis, own, at: scale(Math.min(...own), Math.max(...own), ends[1], ends[0], axis.log) };
    const place = scale(0, axis.choices.length - 1, ends[1], ends[0]);
    return { ...axis, own, at: (v) => place(axis.choices.indexOf(v)) };
  });
  axes.push({ name: data.metric, own: values, at: scale(Math.min(...values), Math.max(...values), ends[1], ends[0]) });
  const [svg, width] = open(host, height);
  for (const axis of axes) axis.named = axis.choices ? axis.choices.map((c) => [shown(c), axis.at(c)]) : axis.at.ticks(4).map((v) => [shown(v), axis.at(v)]);
  const longest = Math.max(...axes[0].named.map(([text]) => text.length));
  const start = Math.max(50, Math.min(12 + 7 * longest, width / 4)); // the labels of the first axis have more room
  const gap = (width - 60 - start) / Math.max(axes.length - 1, 1), left = (i) => start + i * gap;
  const order = [...complete.keys()].sort((a, b) => better(values[b], values[a]));
  const lines = order.map((i, rank) => {
    const t = complete[i], points = axes.map((axis, k) => [left(k), axis.at(axis.own[i])]);
    const node = add(svg, "path", { class: `path value ${t === best ? "best" : ""}`, "data-trial": t.number, d: path(points) });
    node.style.setProperty("--share", `${Math.round(100 * (rank / Math.max(order.length - 1, 1)) ** 3)}%`);
    return { trial: t.number, points, lines: [`${data.metric} ${shown(t.value)}`] };
  });
  axes.forEach((axis, k) => {
    add(svg, "line", { class: "axis", x1: left(k), x2: left(k), y1: ends[0], y2: ends[1] });
    const name = add(svg, "text", { x: left(k), y: k % 2 && gap < 110 ? 34 : 16, "text-anchor": "middle", class: "strong" }, clipped(axis.name, Math.floor((gap < 110 ? 2 * gap : gap) / 7.5)));
    add(name, "title", {}, axis.name);
    for (const [text, y] of axis.named) {
      add(svg, "line", { class: "axis", x1: left(k) - 3, x2: left(k) + 3, y1: y, y2: y });
      add(svg, "text", { x: left(k) - 6, y: y + 4, "text-anchor": "end", class: "halo" }, clipped(text, Math.floor((k ? gap - 10 : start - 6) / 7)));
    }
  });
  watch(svg, (x, y) => {
    const k = Math.min(Math.max(Math.floor((x - left(0)) / gap), 0), axes.length - 2), share = (x - left(k)) / gap;
    let found, least = 24;
    for (const line of lines) {
      const far = Math.abs(line.points[k][1] + share * (line.points[k + 1][1] - line.points[k][1]) - y);
      if (far <= least) [found, least] = [line, far];
    }
    return found;
  });
}

function finalists(host) {
  const rows = data.finalists, height = 44 + 34 * rows.length;
  const all = rows.flatMap((row) => [row.search, row.mean, ...row.values]).filter((v) => v !== null);
  const pad = (Math.max(...all) - Math.min(...all)) * 0.06;
  const [svg, width] = open(host, height);
  const x = scale(Math.min(...all) - pad, Math.max(...all) + pad, 76, width - 16);
  for (const tick of x.ticks(Math.max(Math.floor(width / 110), 2))) {
    add(svg, "line", { class: "grid", x1: x(tick), x2: x(tick), y1: 6, y2: height - 36 });
    add(svg, "text", { x: x(tick), y: height - 20, "text-anchor": "middle" }, shown(tick));
  }
  add(svg, "text", { x: (76 + width) / 2, y: height - 3, "text-anchor": "middle" }, clipped(data.metric, 50));
  const marks = [];
  rows.forEach((row, i) => {
    const y = 24 + 34 * i, won = row.verdict === "winner";
    const mark = (value, what) => marks.push({ x: x(value), y, trial: row.trial, lines: [`${data.metric} ${shown(value)}, ${what}`] });
    add(svg, "text", { x: 4, y: y + 4, class: won ? "strong" : "" }, `trial ${row.trial}`);
    add(svg, "line", { class: "grid", x1: 76, x2: width - 16, y1: y, y2: y });
    add(svg, "circle", { class: "dot hollow", "data-trial": row.trial, cx: x(row.search), cy: y, r: 6 });
    mark(row.search, "in the search");
    for (const value of row.values.filter((v) => v !== null)) {
      add(svg, "circle", { class: "dot seed", cx: x(value), cy: y, r: 4 });
      mark(value, "retrained");
    }
    if (row.mean === null) return;
    add(svg, "path", { class: `mean ${won ? "best" : ""}`, d: `M${x(row.mean)} ${y - 7}l7 7l-7 7l-7 -7Z` });
    mark(row.mean, "mean of the retrained runs");
  });
  watch(svg, among(marks, 24));
}

// --- tables ---

function sorting(table) {
  const heads = [...table.tHead.rows[0].cells];
  const key = (row, i) => {
    const cell = row.cells[i];
    return cell.dataset.by ?? cell.textContent.trim();
  };
  function sort(i, way) {
    const sign = way === "ascending" ? 1 : -1, body = table.tBodies[0], rows = [...body.rows];
    const keys = new Map(rows.map((row) => [row, key(row, i)]));
    const numbers = [...keys.values()].every((text) => text === "" || !Number.isNaN(Number(text)));
    rows.sort((a, b) => {
      const [one, other] = [keys.get(a), keys.get(b)];
      if (one === "" || other === "") return (one === "") - (other === ""); // missing values come last
      return sign * (numbers ? Number(one) - Number(other) : one.localeCompare(other));
    });
    body.append(...rows);
    if (rows.some((row) => row.tabIndex === 0)) rows.forEach((row, k) => (row.tabIndex = k ? -1 : 0));
    for (const head of heads) head.removeAttribute("aria-sort");
    heads[i].setAttribute("aria-sort", way);
  }
  heads.forEach((head, i) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const first = head.dataset.best ?? "ascending";
      const turned = first === "ascending" ? "descending" : "ascending";
      sort(i, head.getAttribute("aria-sort") === first ? turned : first);
    });
  });
}

// Highlights the trial of the row with the pointer or the focus. Tab enters the table; the arrow keys change the row.
function highlighting(table) {
  const body = table.tBodies[0];
  for (const row of body.rows) row.tabIndex = row.rowIndex === 1 ? 0 : -1;
  table.addEventListener("pointerover", (event) => heat(trialOf(event.target)));
  table.addEventListener("pointerleave", rest);
  body.addEventListener("focusin", ({ target, relatedTarget }) => {
    rest();
    const entered = target.matches(":focus-visible") && !body.contains(relatedTarget);
    if (entered) table.parentElement.scrollLeft = 0; // after the last heading, the first columns are out of view
  });
  body.addEventListener("focusout", () => heat(undefined));
  body.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr");
    const next = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling }[event.key];
    if (!next) return;
    event.preventDefault();
    next.focus();
  });
}

for (const table of document.querySelectorAll("table.sortable")) sorting(table);
for (const table of document.querySelectorAll("table:has(tr[data-trial])")) highlighting(table);
show({ history, curves, spent, parallel, finalists });
document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
document.addEventListener("scroll", hide, { passive: true, capture: true });
