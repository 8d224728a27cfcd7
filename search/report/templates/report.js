"use strict";
// Draws a report's figures from the JSON beside it and sorts its tables. Colours are all in the style sheet, so that
// figures follow the reader's theme; names and values that users chose become text nodes, never markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const trials = new Map(data.trials.map((trial) => [trial.number, trial]));
  const complete = data.trials.filter((trial) => trial.state === "complete" && trial.value !== null);
  const better = (a, b) => (data.maximize ? b - a : a - b);
  const best = [...complete].sort((a, b) => better(a.value, b.value) || a.number - b.number)[0];
  const tip = document.getElementById("tip");
  const HEIGHT = 300;
  const APART = 7; // pixels between foreseen ends

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

  // The range of values, without the far end of bad ones, which would press the good ones into a line.
  function range(values) {
    const sorted = [...values].sort(better);
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

  function frame(host, xs, ys, xname, beside = 0) {
    const [svg, width] = open(host, HEIGHT);
    const box = { left: 50, right: width - 12, top: 26, bottom: HEIGHT - 40 };
    const x = scale(xs[0], xs[1], box.left, box.right - beside), y = scale(ys.low, ys.high, box.bottom, box.top);
    for (const tick of y.ticks(6)) {
      add(svg, "line", { class: "grid", x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) });
      add(svg, "text", { x: box.left - 8, y: y(tick) + 4, "text-anchor": "end" }, shown(tick));
    }
    for (const tick of x.ticks(Math.max(Math.floor(width / 80), 2)).filter(Number.isInteger)) {
      add(svg, "text", { x: x(tick), y: box.bottom + 18, "text-anchor": "middle" }, shown(tick));
    }
    add(svg, "line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom });
    add(svg, "text", { x: (box.left + box.right) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, xname);
    const cut = ys.cut ? ` (${ys.cut} worse ${ys.cut === 1 ? "value" : "values"} at the edge)` : "";
    add(svg, "text", { x: 4, y: 12 }, clipped(data.metric, 40) + cut);
    return { svg, x, y, box };
  }

  function path(points) {
    return points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  }

  // --- what a figure tells under the pointer ---

  let hot;

  function heat(number) {
    if (number === hot) return;
    for (const node of document.querySelectorAll(".hot")) node.classList.remove("hot");
    hot = number;
    if (number !== undefined) for (const node of document.querySelectorAll(`[data-trial="${number}"]`)) node.classList.add("hot");
  }

  function line(parent, tag, text) {
    const node = document.createElement(tag);
    node.textContent = text;
    parent.append(node);
  }

  function tell(mark, event) {
    const trial = trials.get(mark.trial);
    tip.replaceChildren();
    line(tip, "b", `trial ${mark.trial}${trial ? ` · ${trial.state}` : ""}`);
    for (const text of mark.lines) line(tip, "span", text);
    if (trial && trial.reason) line(tip, "span", trial.reason);
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
    heat(undefined);
  }

  function watch(svg, nearest) {
    const look = (event) => {
      const corner = svg.getBoundingClientRect();
      const mark = nearest(event.clientX - corner.left, event.clientY - corner.top);
      if (!mark) return hide();
      heat(mark.trial);
      tell(mark, event);
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
      add(svg, "circle", { class: `dot ${kind}`, "data-trial": t.number, cx: marks[i].x, cy: marks[i].y, r: t === best ? 6 : 4 });
    });
    watch(svg, among(marks));
  }

  function curves(host) {
    const drawn = data.trials.map((t) => [t, t.curve.filter(([, v]) => v !== null)]).filter(([, c]) => c.length);
    if (!drawn.length) return nothing(host);
    const ys = range([...drawn.flatMap(([, curve]) => curve.map(([, v]) => v)), ...data.foreseen.flatMap((f) => [f.value, f.low, f.high])]);
    const last = data.foreseen.length ? data.epochs : Math.max(2, ...drawn.map(([, curve]) => curve[curve.length - 1][0]));
    const { svg, x, y } = frame(host, [1, last], ys, "epoch", APART * data.foreseen.length);
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

  // What trials are foreseen to end with: side by side behind the last epoch, so that their bands can be told apart.
  function ends(svg, x, y, marks, lasts) {
    data.foreseen.forEach(({ trial, value, low, high }, i) => {
      const at = x(data.epochs) + APART * (i + 0.5), from = lasts.get(trial);
      if (!from) return;
      const own = { "data-trial": trial };
      add(svg, "path", { class: "path foreseen", d: path([[x(from[0]), y(from[1])], [at, y(value)]]), ...own });
      add(svg, "path", { class: "path band", d: path([[at, y(low)], [at, y(high)]]), ...own });
      add(svg, "circle", { class: "dot foreseen", cx: at, cy: y(value), r: 3.5, ...own });
      marks.push({ x: at, y: y(value), trial, lines: [`foreseen ${data.metric} ${shown(value)}`, `nine of ten between ${shown(low)} and ${shown(high)}`] });
    });
  }

  function spent(host) {
    const { epochs, best: found } = data.spent;
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
    const start = Math.max(50, Math.min(12 + 7 * longest, width / 4)); // the first axis has nothing on its left to write over
    const gap = (width - 60 - start) / Math.max(axes.length - 1, 1), left = (i) => start + i * gap;
    const least = complete.length < 40 ? 45 : 15; // per cent: many lines must leave the good ones to be seen
    const order = [...complete.keys()].sort((a, b) => better(values[b], values[a]));
    const lines = order.map((i, rank) => {
      const t = complete[i], points = axes.map((axis, k) => [left(k), axis.at(axis.own[i])]);
      const node = add(svg, "path", { class: `path value ${t === best ? "best" : ""}`, "data-trial": t.number, d: path(points) });
      node.style.setProperty("--share", `${Math.round(least + (100 - least) * (rank / Math.max(order.length - 1, 1)) ** 3)}%`);
      return { trial: t.number, points, lines: [`${data.metric} ${shown(t.value)}`] };
    });
    axes.forEach((axis, k) => {
      add(svg, "line", { class: "axis", x1: left(k), x2: left(k), y1: ends[0], y2: ends[1] });
      const name = add(svg, "text", { x: left(k), y: k % 2 && gap < 110 ? 34 : 16, "text-anchor": "middle", class: "strong" }, clipped(axis.name, Math.floor((gap < 110 ? 2 * gap : gap) / 7.5)));
      add(name, "title", {}, axis.name);
      for (const [text, y] of axis.named) {
        add(svg, "line", { class: "axis", x1: left(k) - 3, x2: left(k) + 3, y1: y, y2: y });
        add(svg, "text", { x: left(k) - 6, y: y + 4, "text-anchor": "end", class: "halo" }, clipped(text, Math.floor((k ? gap : start - 6) / 7)));
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
        mark(value, "of a fresh run");
      }
      if (row.mean === null) return;
      add(svg, "path", { class: `mean ${won ? "best" : ""}`, d: `M${x(row.mean)} ${y - 7}l7 7l-7 7l-7 -7Z` });
      mark(row.mean, "mean of the fresh runs");
    });
    watch(svg, among(marks, 24));
  }

  function nothing(host) {
    host.replaceChildren();
    line(host, "p", "No value was reported yet.");
    host.firstChild.className = "dim";
    if (host.nextElementSibling) host.nextElementSibling.hidden = true; // the legend
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
        if (one === "" || other === "") return (one === "") - (other === ""); // what is missing comes last
        return sign * (numbers ? Number(one) - Number(other) : one.localeCompare(other));
      });
      body.append(...rows);
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
    table.addEventListener("pointerover", (event) => {
      const row = event.target.closest("tr[data-trial]");
      heat(row ? Number(row.dataset.trial) : undefined);
    });
    table.addEventListener("pointerleave", () => heat(undefined));
  }

  for (const table of document.querySelectorAll("table.sortable")) sorting(table);
  for (const [id, draw] of Object.entries({ history, curves, spent, parallel, finalists })) {
    const host = document.getElementById(id);
    if (!host) continue;
    let width;
    new ResizeObserver(() => {
      if (host.clientWidth !== width) draw(host, (width = host.clientWidth));
    }).observe(host);
  }
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  document.addEventListener("scroll", hide, { passive: true, capture: true });
})();
