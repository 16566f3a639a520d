// Draws a dashboard from the query results of board.py, similar to Grafana but much simpler.

const COLOURS = [
  "#73bf69", "#f2a300", "#5794f2", "#f2495c", "#b877d9", "#37872d", "#ff9830", "#1f60c4", "#c4162a", "#8f3bb8",
  "#3aa6a6", "#a1622d", "#7b8794", "#d683ce", "#6b8e00", "#00707f", "#b5893a", "#444c9f", "#e05f9a", "#2e8b6b",
];
const NAMED = { green: "#37872d", red: "#c4162a", orange: "#e06500", blue: "#3274d9", text: "#9aa1a9", purple: "#8f3bb8" };
const ROW = 23; // pixels a unit of a panel's height
const BAR = 11; // pixels a series of a timeline
const LEFT = 46;
const BOTTOM = 14;

let board;

function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function shape(name, given, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(given)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

const rounded = (value) => new Intl.NumberFormat("en", { maximumSignificantDigits: 3 }).format(value);

function said(value, unit) {
  if (value == null) return "";
  if (typeof value === "string") return value;
  if (unit === "s") return Math.abs(value) < 1 && value ? `${rounded(value * 1000)} ms` : `${rounded(value)} s`;
  if (unit === "percentunit") return `${rounded(value * 100)} %`;
  if (unit === "bool_yes_no") return value ? "yes" : "no";
  return rounded(value) + (["cps", "ops", "wps"].includes(unit) ? "/s" : "");
}

function clock(seconds) {
  return new Date((board.end - board.seconds + seconds) * 1000).toISOString().slice(11, 19);
}

// About this number of round numbers between two values.
function ticks(low, high, about) {
  const rough = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((it) => it * power).find((it) => it >= rough);
  const [first, last] = [Math.ceil(low / step), Math.floor(high / step + 1e-6)];
  return Array.from({ length: last - first + 1 }, (_, number) => (first + number || 0) * step);
}

function across(svg, left, width, height) {
  const x = (at) => left + (at / board.seconds) * (width - left);
  for (const at of ticks(0, board.seconds, 4).filter((it) => x(it) < width - 30)) {
    svg.append(shape("line", { x1: x(at), x2: x(at), y1: 0, y2: height, stroke: "#eee" }));
    svg.append(shape("text", { x: x(at), y: height + 11, "text-anchor": at ? "middle" : "start" }, clock(at)));
  }
  return x;
}

function annotations(svg, x, height) {
  for (const { at, until, text } of board.annotations) {
    const given = { x: x(at), y: 0, width: x(until) - x(at), height, fill: NAMED.purple, opacity: 0.15 };
    svg.append(shape("rect", given));
    const line = shape("line", {
      x1: x(at), x2: x(at), y1: 0, y2: height, stroke: NAMED.purple, "stroke-dasharray": "3 2",
    });
    line.append(shape("title", {}, text));
    svg.append(line);
  }
}

// Stacks each series on the previous ones, where all of them have a value.
function stacked(series) {
  const below = new Map();
  return series.map(({ name, values }) => ({
    name,
    values: values.map(([at, value]) => {
      const from = below.get(at) ?? 0;
      below.set(at, from + value);
      return [at, from + value, from];
    }),
  }));
}

// Runs without a gap: a line breaks where values are missing.
function runs(values) {
  const found = [];
  for (const it of values) {
    if (found.length && it[0] - found.at(-1).at(-1)[0] < 1.5) found.at(-1).push(it);
    else found.push([it]);
  }
  return found;
}

function timeseries(panel, width) {
  const { defaults } = panel.fieldConfig;
  const stacking = defaults.custom.stacking.mode === "normal";
  const series = stacking ? stacked(panel.series) : panel.series;
  const height = panel.gridPos.h * ROW - 62;
  const values = series.flatMap((it) => it.values.map(([, value]) => value));
  const low = Math.min(defaults.min ?? Infinity, ...values);
  const high = Math.max(...values) > low ? Math.max(...values) : low + 1;
  const base = Math.max(low, Math.min(0, high));
  const svg = shape("svg", { width, height: height + BOTTOM });
  const y = (value) => height - ((value - low) / (high - low)) * (height - 6);
  for (const at of ticks(low, high, 3)) {
    svg.append(shape("line", { x1: LEFT, x2: width, y1: y(at), y2: y(at), stroke: "#eee" }));
    svg.append(shape("text", { x: LEFT - 4, y: y(at) + 3, "text-anchor": "end" }, said(at, defaults.unit)));
  }
  const x = across(svg, LEFT, width, height);
  annotations(svg, x, height);
  const legend = element("p", "", "legend");
  series.forEach(({ name, values: points }, number) => {
    const colour = COLOURS[number % COLOURS.length];
    for (const run of runs(points)) svg.append(...line(run, x, y, base, colour, 0.1 + defaults.custom.fillOpacity / 100));
    const entry = element("span", name);
    const mark = element("i");
    mark.style.background = colour;
    entry.prepend(mark);
    legend.append(entry);
  });
  return [svg, legend];
}

function line(run, x, y, base, colour, opacity) {
  if (run.length === 1) return [shape("circle", { cx: x(run[0][0]), cy: y(run[0][1]), r: 1.5, fill: colour })];
  const upper = run.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`);
  const lower = run.map(([at, , from]) => `${x(at).toFixed(1)},${y(from ?? base).toFixed(1)}`).reverse();
  return [
    shape("polygon", { points: [...upper, ...lower].join(" "), fill: colour, opacity }),
    shape("polyline", { points: upper.join(" "), fill: "none", stroke: colour, "stroke-width": 1.3 }),
  ];
}

function timeline(panel, width) {
  const { mappings, thresholds } = panel.fieldConfig.defaults;
  const states = mappings[0].options;
  const series = [...panel.series].sort((a, b) => (a.name < b.name ? -1 : 1));
  const left = 10 + 5.6 * Math.max(0, ...series.map(({ name }) => name.length));
  const height = Math.max(series.length * BAR, 20);
  const svg = shape("svg", { width, height: height + BOTTOM });
  const x = across(svg, left, width, height);
  annotations(svg, x, height);
  series.forEach(({ name, values }, number) => {
    svg.append(shape("text", { x: left - 6, y: number * BAR + 9, "text-anchor": "end" }, name));
    for (const run of runs(values)) {
      for (const [at, value] of run) {
        const fill = NAMED[(states[value] ?? thresholds.steps[0]).color];
        const end = Math.max(at, Math.min(at + 1.05, board.seconds)); // a last value may lie a hair beyond
        svg.append(shape("rect", { x: x(at), y: number * BAR + 1, width: x(end) - x(at), height: BAR - 2, fill }));
      }
    }
  });
  const legend = element("p", "", "legend");
  for (const { text, color } of Object.values(states)) {
    const entry = element("span", text);
    const mark = element("i");
    mark.style.background = NAMED[color];
    entry.prepend(mark);
    legend.append(entry);
  }
  return [svg, legend];
}

function stat(panel) {
  const { defaults } = panel.fieldConfig;
  const value = panel.series[0]?.values.at(-1)?.[1];
  const made = element("p", value == null ? defaults.noValue : said(value, defaults.unit), "stat");
  const { color } = defaults.thresholds.steps.findLast((it) => it.value == null || value >= it.value);
  made.style.background = NAMED[color];
  return [made];
}

function table(panel) {
  const { columns, units, rows } = panel.table;
  const made = element("table");
  const line = (cells, name) => {
    const row = element("tr");
    row.append(...cells.map((it) => element(name, it)));
    made.append(row);
  };
  line(columns, "th");
  for (const row of sorted(panel)) line(row.map((it, number) => said(it, units[number])), "td");
  return rows.length ? [made] : [];
}

function sorted({ options, table: { columns, rows } }) {
  const by = (options.sortBy ?? [])[0];
  const column = by ? columns.indexOf(by.displayName) : -1;
  if (column < 0) return [...rows].sort();
  return [...rows].sort((a, b) => (by.desc ? b[column] - a[column] : a[column] - b[column]));
}

const KINDS = { timeseries, "state-timeline": timeline, stat, table };

function drawn(panel) {
  const made = element("section", "", "panel");
  const { x, w } = panel.gridPos;
  made.style.gridColumn = `${x + 1} / span ${w}`;
  made.dataset.title = panel.title;
  made.append(element("h3", panel.title), element("p", panel.description));
  const many = panel.table ? panel.table.rows.length : panel.series.length;
  made.dataset.drawn = many;
  const width = Math.floor((document.body.clientWidth - 24) / 24) * w - 26;
  made.append(...(many ? KINDS[panel.type](panel, width) : [element("p", "No data", "none")]));
  return made;
}

// Draws the dashboard, and returns its height.
function draw(told) { // eslint-disable-line no-unused-vars
  board = told;
  const [title, words] = document.querySelector("header").children;
  title.textContent = board.title;
  words.textContent = `${board.description} Drawn by our tests, not by Grafana: ${clock(0)} to ${clock(board.seconds)}, `
    + "UTC. Rebalances are purple, from the dashed line on.";
  const bands = new Map();
  for (const panel of board.panels) {
    if (panel.type === "row") {
      document.querySelector("main").append(element("h2", panel.title));
      continue;
    }
    if (!bands.has(panel.gridPos.y)) {
      bands.set(panel.gridPos.y, element("div", "", "band"));
      document.querySelector("main").append(bands.get(panel.gridPos.y));
    }
    bands.get(panel.gridPos.y).append(drawn(panel));
  }
  return Math.ceil(document.documentElement.getBoundingClientRect().height);
}
