"use strict";
const all = (query, root = document) => [...root.querySelectorAll(query)];
const one = (query, root = document) => root.querySelector(query);

// A heading of a table sorts its rows: numbers from the largest, text from A.
for (const table of all("table[data-sorts]")) {
  const headings = all("thead th", table);
  headings.forEach((heading, column) => one("button", heading).addEventListener("click", () => {
    const numeric = heading.classList.contains("n");
    const before = heading.getAttribute("aria-sort");
    const down = before === "none" ? numeric : before === "ascending";
    const rows = all("tbody tr", table).map((row) => [row.cells[column].textContent, row]);
    const order = numeric ? (a, b) => a[0] - b[0] : (a, b) => a[0].localeCompare(b[0], "en");
    rows.sort((a, b) => (down ? -order(a, b) : order(a, b)));
    one("tbody", table).append(...rows.map((row) => row[1]));
    headings.forEach((other) => other.setAttribute("aria-sort", "none"));
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  }));
}

// A chart: lines over one axis in an svg of 440 x 250; null is a gap. Returns where the values lie across, and what
// moves the cursor there.
const make = (kind, attributes, text = "") => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
};
const ticks = (low, high) => {  // three to six round numbers
  const power = 10 ** Math.floor(Math.log10(high - low));
  const step = [0.2, 0.25, 0.5, 1, 2].map((part) => part * power).find((size) => (high - low) / size <= 5.5);
  const first = Math.ceil(low / step - 1e-9), count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: count }, (_, number) => +((first + number) * step).toPrecision(10));
};
const draw = (svg, { x, series, axis, mark, top }) => {
  const alone = x.length === 1 ? 1 : 0, left = x[0] - alone, right = x.at(-1) + alone;
  const known = series.flatMap((line) => line[1]).filter((value) => value !== null);
  const low = Math.min(0, ...known), most = Math.max(0, ...known);
  const high = top ?? (most > low ? low + 1.05 * (most - low) : low + 1);
  const across = (value) => (56 + 372 * (value - left) / (right - left)).toFixed(1);
  const up = (value) => (216 - 204 * (value - low) / (high - low)).toFixed(1);
  const number = (value) => +value.toPrecision(4), nodes = [];
  for (const tick of ticks(low, high)) {
    nodes.push(make("line", { class: "grid", x1: 56, x2: 428, y1: up(tick), y2: up(tick) }));
    nodes.push(make("text", { class: "tick", x: 50, y: +up(tick) + 4, "text-anchor": "end" }, number(tick)));
  }
  for (const tick of ticks(left, right)) {
    nodes.push(make("text", { class: "tick", x: across(tick), y: 232, "text-anchor": "middle" }, number(tick)));
  }
  nodes.push(make("text", { class: "axis", x: 242, y: 246, "text-anchor": "middle" }, axis));
  if (mark !== null) nodes.push(make("line", { class: "mark", x1: across(mark), x2: across(mark), y1: 12, y2: 216 }));
  series.forEach(([, values], number) => {
    let run = [];
    for (let i = 0; i <= values.length; i++) {
      if (i < values.length && values[i] !== null) run.push([across(x[i]), up(values[i])]);
      else if (run.length) {
        if (run.length > 1) nodes.push(make("polyline", { class: `line s${number}`, points: run.join(" ") }));
        else nodes.push(make("circle", { class: `dot s${number}`, cx: run[0][0], cy: run[0][1], r: 3 }));
        run = [];
      }
    }
  });
  const cursor = make("line", { class: "cursor", y1: 12, y2: 216, hidden: "hidden" }), at = x.map(across);
  svg.replaceChildren(...nodes, cursor);
  return [at, (place) => {
    cursor.toggleAttribute("hidden", place === null);
    if (place !== null) for (const side of ["x1", "x2"]) cursor.setAttribute(side, at[place]);
  }];
};

// A pointer on a chart, or the arrow keys, show the values there.
for (const svg of all("svg[data-chart]")) {
  const chart = JSON.parse(svg.dataset.chart), output = one("output", svg.nextElementSibling);
  const [at, move] = draw(svg, chart);
  let place = at.length;
  const show = (step) => {
    place = Math.min(Math.max(step, 0), at.length - 1);
    move(place);
    const values = chart.series.map(([name, values]) => `${name} ${values[place] ?? "–"}`);
    output.textContent = `${chart.axis} ${chart.x[place]}: ${values.join(", ")}`;
  };
  const hide = () => { move(null); output.textContent = ""; };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * 440;
    const distances = at.map((own) => Math.abs(own - x));
    show(distances.indexOf(Math.min(...distances)));
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) { event.preventDefault(); show(place + by); }
  });
}

// The slider: precision, recall and F1 at each confidence.
const data = one("#curves-data");
if (data) {
  const { confidence, groups, start } = JSON.parse(data.textContent);
  const select = one("[data-group]"), slider = one("[data-step]"), drawing = one("[data-curves]");
  const out = (name, text) => { one(`[data-out="${name}"]`).textContent = text; };
  let group, move;
  groups.forEach((group, number) => select.append(new Option(group.name, number)));
  slider.max = confidence.length - 1;
  const show = () => {
    const step = +slider.value;
    for (const name of ["p", "r", "f"]) out(name, (group[name][step] / 1000).toFixed(3));
    out("confidence", confidence[step].toFixed(3));
    out("note", step === group.best ? "the best" : `the best is ${confidence[group.best].toFixed(3)}`);
    const found = group.c[step].toLocaleString("en"), objects = group.objects.toLocaleString("en");
    out("counts", `${found} of ${objects} objects detected, ${(group.n[step] - group.c[step]).toLocaleString("en")} false`);
    slider.setAttribute("aria-valuetext", confidence[step].toFixed(3));
    move(step);
  };
  const best = () => { slider.value = group.best; show(); };
  const choose = (number) => {
    group = groups[number];
    const series = ["p", "r", "f"].map((name) => [name, group[name].map((value) => value / 1000)]);
    [, move] = draw(drawing, { x: confidence, series, axis: "confidence", mark: confidence[group.best], top: 1 });
    best();
  };
  select.addEventListener("change", () => choose(select.value));
  slider.addEventListener("input", show);
  one("[data-best]").addEventListener("click", best);
  select.value = 0;
  choose(0);
  slider.value = start;
  show();
}

// Filters of the gallery; a cell of the confusion matrix sets that of the classes.
const filters = one("[data-filters]");
if (filters) {
  const errors = all(".gallery li"), fields = all("[data-filter]", filters), output = one("output", filters);
  const more = one("[data-more]"), MOST = 24;
  let most = MOST;
  const pairs = one("[data-filter=pair]", filters), known = new Map();
  for (const error of errors) known.set(error.dataset.pair, [error.dataset.classes, (known.get(error.dataset.pair)?.[1] ?? 0) + 1]);
  const listed = [...known].sort((a, b) => b[1][1] - a[1][1] || a[1][0].localeCompare(b[1][0], "en"));
  for (const [pair, [says, count]] of listed) pairs.append(new Option(`${says} (${count})`, pair));
  const matches = (error, { dataset, value }) => {
    const found = error.dataset[dataset.filter];
    return !value || (dataset.filter === "image" ? found.toLowerCase().includes(value.toLowerCase()) : found === value);
  };
  const show = () => {
    const found = errors.filter((error) => fields.every((field) => matches(error, field)));
    for (const error of errors) error.hidden = true;
    for (const error of found.slice(0, most)) error.hidden = false;
    more.hidden = found.length <= most;
    output.textContent = `${Math.min(most, found.length)} of ${found.length} shown`;
  };
  const filter = () => { most = MOST; show(); };
  const clear = () => { for (const field of fields) field.value = ""; filter(); };
  for (const field of fields) field.addEventListener("input", filter);
  more.addEventListener("click", () => { most += MOST; show(); });
  one("[data-clear]", filters).addEventListener("click", clear);
  for (const cell of all("button[data-pair]")) cell.addEventListener("click", () => {
    clear();
    pairs.value = cell.dataset.pair;
    filter();
    const heading = one("#gallery h2");
    heading.focus();
    heading.scrollIntoView();
  });
  clear();
}
