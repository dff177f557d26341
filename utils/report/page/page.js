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

// A pointer on a chart, or the arrow keys, show the values there.
for (const chart of all("svg[data-chart]")) {
  const held = JSON.parse(chart.dataset.chart), cursor = one(".cursor", chart);
  const output = one("output", chart.nextElementSibling);
  let place = held.x.length;
  const show = (step) => {
    place = Math.min(Math.max(step, 0), held.x.length - 1);
    cursor.removeAttribute("hidden");
    cursor.setAttribute("x1", held.at[place]);
    cursor.setAttribute("x2", held.at[place]);
    const values = held.series.map(([name, values]) => `${name} ${values[place] ?? "–"}`);
    output.textContent = `${held.axis} ${held.x[place]}: ${values.join(", ")}`;
  };
  const hide = () => { cursor.setAttribute("hidden", "hidden"); output.textContent = ""; };
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * chart.viewBox.baseVal.width;
    const distances = held.at.map((at) => Math.abs(at - x));
    show(distances.indexOf(Math.min(...distances)));
  });
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) { event.preventDefault(); show(place + by); }
  });
}

// The slider: precision, recall and F1 at each confidence.
const data = one("#curves-data");
if (data) {
  const { confidence, groups } = JSON.parse(data.textContent);
  const select = one("[data-group]"), slider = one("[data-step]"), drawing = one("[data-curves]");
  const out = (name, text) => { one(`[data-out="${name}"]`).textContent = text; };
  const make = (kind, attributes, text = "") => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", kind);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.textContent = text;
    return node;
  };
  const across = (value) => (52 + 376 * value).toFixed(1), up = (value) => (216 - 204 * value).toFixed(1);
  const cursor = make("line", { class: "cursor", y1: 12, y2: 216 });
  groups.forEach((group, number) => select.append(new Option(group.name, number)));
  slider.max = confidence.length - 1;
  const draw = (group) => {
    const nodes = [];
    for (const tick of [0, 0.25, 0.5, 0.75, 1]) {
      nodes.push(make("line", { class: "grid", x1: 52, x2: 428, y1: up(tick), y2: up(tick) }));
      nodes.push(make("text", { class: "tick", x: 46, y: +up(tick) + 4, "text-anchor": "end" }, tick));
      nodes.push(make("text", { class: "tick", x: across(tick), y: 232, "text-anchor": "middle" }, tick));
    }
    nodes.push(make("text", { class: "axis", x: 240, y: 246, "text-anchor": "middle" }, "confidence"));
    ["p", "r", "f"].forEach((name, number) => {
      const points = group[name].map((value, i) => `${across(confidence[i])},${up(value / 1000)}`).join(" ");
      nodes.push(make("polyline", { class: `line s${number}`, points }));
    });
    const best = across(confidence[group.best]);
    nodes.push(make("line", { class: "mark", x1: best, x2: best, y1: 12, y2: 216 }), cursor);
    drawing.replaceChildren(...nodes);
  };
  const show = () => {
    const group = groups[select.value], step = +slider.value;
    for (const name of ["p", "r", "f"]) out(name, (group[name][step] / 1000).toFixed(3));
    out("confidence", confidence[step].toFixed(3));
    out("note", step === group.best ? "the best" : `the best is ${confidence[group.best].toFixed(3)}`);
    const found = group.c[step].toLocaleString("en"), objects = group.objects.toLocaleString("en");
    out("counts", `${found} of ${objects} objects found, ${(group.n[step] - group.c[step]).toLocaleString("en")} false`);
    slider.setAttribute("aria-valuetext", confidence[step].toFixed(3));
    cursor.setAttribute("x1", across(confidence[step]));
    cursor.setAttribute("x2", across(confidence[step]));
  };
  const best = () => { slider.value = groups[select.value].best; show(); };
  select.addEventListener("change", () => { draw(groups[select.value]); best(); });
  slider.addEventListener("input", show);
  one("[data-best]").addEventListener("click", best);
  select.value = 0;
  draw(groups[0]);
  best();
}

// Filters of the gallery; a cell of the confusion matrix sets that of the classes.
const filters = one("[data-filters]");
if (filters) {
  const errors = all(".gallery li"), fields = all("[data-filter]", filters), output = one("output", filters);
  const more = one("[data-more]"), MOST = 24;
  let most = MOST;
  const pairs = one("[data-filter=pair]", filters), known = new Map();
  for (const error of errors) known.set(error.dataset.pair, [error.dataset.cell, (known.get(error.dataset.pair)?.[1] ?? 0) + 1]);
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
