// Draws every figure.chart of a [data-charts] element from the JSON at the address in that attribute; refresh() loads the
// JSON again. A saved page contains its JSON. The form #view has the reader's choices.
import { shown } from "./curves.js";

const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3], [1, 5], [12, 4]];
const BAND = 0.16, STACK = 0.38, FAINT = 0.3;
const style = getComputedStyle(document.documentElement);
let fine = 1; // scale of a plot's drawing: for paper it is drawn larger, and the style sheet shrinks it
const colour = (name) => style.getPropertyValue(name).trim();
const clear = (css, alpha) => {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(css.slice(at, at + 2), 16));
  return `rgba(${r}, ${g}, ${b}, ${alpha})`;
};
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const WHOLE = new Set(["iteration", "decision turn"]); // axes that are labelled at whole numbers only
const plots = new Map(); // figure -> {plot, chart}
const rooms = new Map(); // [data-charts] element -> its JSON

export function number(value, form) {
  if (value === null || value === undefined) return "–";
  const scaled = form === "percent" ? value * 100 : value;
  const size = Math.abs(scaled);
  const told = size === 0 ? "0"
    : size >= 1000 ? Math.round(scaled).toLocaleString("en")
    : size >= 1e-4 ? String(Number(scaled.toPrecision(3))) : scaled.toExponential(1);
  return told + (form === "percent" ? " %" : form === "seconds" ? " s" : "");
}

// Each colour has its own dashes, for readers who cannot tell colours apart. A style marks a run if there are several, else a line.
function look(curve) {
  const sign = curve.run || curve.line;
  return { stroke: colour(`--s${sign % 6}`), dash: DASHES[(sign + Math.floor(sign / 6)) % 6] };
}

function columns(chart) {
  const data = [chart.x], series = [{}], bands = [], none = { points: { show: false }, width: 0, spanGaps: true };
  const positive = (values) => (chart.log ? values.map((value) => (value > 0 ? value : null)) : values);
  let below = chart.x.map(() => 0);
  for (const curve of chart.curves) {
    const { stroke, dash } = look(curve);
    let y = curve.y;
    if (chart.stacked) y = below = y.map((value, at) => below[at] + (value ?? 0));
    series.push({
      label: curve.label, stroke, dash: dash.map((length) => length * fine), width: (curve.pinned ? 3 : 1.6) * fine, spanGaps: true,
      points: { show: curve.dots || chart.x.length === 1, size: 6 * fine, fill: curve.dots ? colour("--raised") : stroke, stroke },
      ...(chart.scatter && { paths: () => null, points: { show: true, size: 3 * fine, fill: stroke, width: 0 } }),
      ...(chart.stacked && { fill: clear(stroke, STACK) }),
    });
    data.push(positive(y));
    if (chart.stacked && data.length > 2) bands.push({ series: [data.length - 1, data.length - 2], fill: clear(stroke, STACK) });
    if (curve.low && !chart.stacked) {
      data.push(positive(curve.high), positive(curve.low));
      series.push({ ...none }, { ...none });
      bands.push({ series: [data.length - 2, data.length - 1], fill: clear(stroke, BAND) });
    }
    if (curve.raw && !chart.stacked) {
      data.push(positive(curve.raw));
      series.push({ ...none, stroke: clear(stroke, FAINT), width: fine });
    }
  }
  return { data, series, bands };
}

function range(plot, low, high) {
  if (low === null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : low > 0 ? [0, low * 1.3] : [low * 1.3, 0];
  const room = (high - low) * 0.08;
  return [low >= 0 && low < high * 0.6 ? 0 : low - room, high + room];
}

function options(figure, chart, series, bands, width, height) {
  const axis = { stroke: colour("--soft"), font: `${11 * fine}px system-ui, sans-serif`, ticks: { show: false },
    gap: 4 * fine, grid: { stroke: colour("--grid"), width: fine } };
  const whole = (plot, splits) => splits.map((at) => (Number.isInteger(at) ? at : ""));
  const short = (plot, splits) => splits.map((at) => SHORT.format(at));
  const room = (plot, values) => fine * (10 + 6.4 * Math.max(2, ...(values ?? []).map((one) => String(one ?? "").length)));
  const told = (plot, splits) => splits.map((at) => (at === null ? null : number(at, chart.form === "percent" ? "percent" : "")));
  return {
    width: width * fine, height: height * fine, series, bands, legend: { show: false }, padding: [8 * fine, 8 * fine, 0, 0],
    scales: { x: { time: false, range: (plot, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: chart.log ? { distr: 3 } : { range } },
    axes: [
      { ...axis, space: 50 * fine, size: 24 * fine, values: WHOLE.has(chart.unit) ? whole : short },
      { ...axis, space: 30 * fine, size: room, values: told },
    ],
    cursor: { y: false, sync: { key: chart.unit, scales: ["x", null] }, points: { size: 6 }, drag: { x: true, y: false } },
    hooks: { setCursor: [(plot) => tell(figure, plot.cursor.idx)] },
  };
}

function tell(figure, index) {
  const chart = plots.get(figure)?.chart;
  if (!chart) return;
  const at = index ?? chart.x.length - 1;
  figure.querySelectorAll(".legend b").forEach((cell, place) => {
    const y = chart.curves[place].y;
    const last = y.findLastIndex((value) => value !== null);
    const value = index === null || index === undefined ? y[chart.stacked ? at : last] : y[at];
    cell.textContent = number(chart.stacked ? value ?? 0 : value, chart.form); // a missing part of a stack is 0
  });
  const where = figure.querySelector(".where");
  if (where) where.textContent = index === null || index === undefined ? "" : `${chart.unit} ${atOf(chart, at)}`;
}

const atOf = (chart, index) => (WHOLE.has(chart.unit) ? chart.x[index] : number(chart.x[index]));

function legend(figure, chart) {
  const list = figure.querySelector(".legend");
  const items = chart.curves.map((curve) => {
    const { stroke, dash } = look(curve);
    const item = document.createElement("li");
    const sign = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    sign.setAttribute("viewBox", "0 0 24 10");
    sign.setAttribute("aria-hidden", "true");
    const line = document.createElementNS(sign.namespaceURI, "path");
    line.setAttribute("d", "M0 5H24");
    line.setAttribute("stroke", stroke);
    line.setAttribute("stroke-width", "2");
    line.setAttribute("stroke-dasharray", dash.join(" "));
    sign.append(line);
    if (curve.dots) {
      const dot = document.createElementNS(sign.namespaceURI, "circle");
      for (const [name, value] of [["cx", 12], ["cy", 5], ["r", 3.2], ["fill", colour("--raised")], ["stroke", stroke], ["stroke-width", 1.6]]) dot.setAttribute(name, value);
      sign.append(dot);
    }
    item.append(sign, `${curve.label} `, document.createElement("b"));
    return item;
  });
  const where = document.createElement("li");
  where.className = "where soft";
  list.replaceChildren(...(chart.scatter ? [] : items), where); // a scatter chart is named by its title
}

// Returns a text for screen readers: the first and the last value of each curve, and its range.
function describe(chart) {
  const parts = chart.curves.filter(({ y }) => y.some((value) => value !== null)).map(({ label, y }) => {
    const at = y.flatMap((value, index) => (value === null ? [] : [index])), values = at.map((index) => y[index]);
    if (chart.scatter) return `${label}: ${at.length} points`;
    const [first, last, low, high] = [values[0], values.at(-1), Math.min(...values), Math.max(...values)].map((value) => number(value, chart.form));
    const begin = `${label}: ${first} at ${chart.unit} ${atOf(chart, at[0])}`;
    return at.length < 2 ? begin : `${begin}, ${last} at ${atOf(chart, at.at(-1))}, between ${low} and ${high}`;
  });
  return `${chart.title}. ${parts.join("; ")}.`;
}

function draw(figure, chart) {
  const place = figure.querySelector(".plot");
  plots.get(figure)?.plot.destroy();
  plots.delete(figure);
  const { data, series, bands } = columns(chart);
  legend(figure, chart);
  const plot = new window.uPlot(options(figure, chart, series, bands, place.clientWidth, place.clientHeight), data, place);
  plots.set(figure, { plot, chart });
  place.setAttribute("aria-label", describe(chart));
  tell(figure, null);
}

// Redraws a chart with new data. If the curves are the same, a reader's zoom stays.
function goOn(figure, chart) {
  const known = plots.get(figure);
  const names = (one) => [one.unit, one.log, ...one.curves.map(({ label, low, raw, pinned }) => [label, !low, !raw, pinned])].join();
  if (!known || names(known.chart) !== names(chart)) return draw(figure, chart);
  const { min, max } = known.plot.scales.x, x = known.chart.x;
  const closer = min > x[0] || max < x[x.length - 1];
  known.chart = chart;
  known.plot.setData(columns(chart).data, !closer);
  if (closer) known.plot.setScale("x", { min, max }); // draws the new data
  figure.querySelector(".plot").setAttribute("aria-label", describe(chart));
  tell(figure, known.plot.cursor.idx);
}

// The arrow keys move through a chart point by point; its live region announces the values.
function walk(event) {
  const figure = event.target.closest("figure.chart");
  const known = figure && plots.get(figure);
  const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
  if (!known || step === undefined || !event.target.classList.contains("plot")) return;
  event.preventDefault();
  event.stopPropagation();
  const { plot, chart } = known, last = chart.x.length - 1;
  const index = Math.min(last, Math.max(0, (plot.cursor.idx ?? (step < 0 ? last + 1 : -1)) + step));
  plot.setCursor({ left: plot.valToPos(chart.x[index], "x"), top: 10 });
  const told = chart.curves.map((curve) => `${curve.label} ${number(curve.y[index], chart.form)}`);
  figure.querySelector("[aria-live]").textContent = `${chart.unit} ${atOf(chart, index)}: ${told.join(", ")}`;
}

const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const known = plots.get(target.closest("figure.chart"));
    if (known && fine === 1 && target.clientWidth && target.clientWidth !== known.plot.width) known.plot.setSize({ width: target.clientWidth, height: target.clientHeight });
  }
});

/** Fetch the JSON and draw it; resolve to whether the page has a figure for each chart. */
export async function refresh(room) {
  const answer = await fetch(room.dataset.charts, { headers: { Accept: "application/json" } });
  if (!answer.ok) throw new Error(`${room.dataset.charts}: ${answer.status}`);
  rooms.set(room, await answer.json());
  const complete = showAll(room);
  room.setAttribute("aria-busy", "false");
  return complete;
}

function showAll(room) {
  const data = rooms.get(room), view = choice();
  let complete = true;
  for (const chart of data.charts) {
    const figure = room.querySelector(`[data-chart="${CSS.escape(chart.key)}"]`);
    if (!figure) { complete = false; continue; }
    if (!plots.has(figure)) resized.observe(figure.querySelector(".plot"));
    const drawn = shown(chart, data, view);
    for (const curve of drawn.curves) curve.pinned = data.runs?.length > 1 && data.runs[curve.run].id === view.pin;
    goOn(figure, drawn);
  }
  for (const option of form?.x.options ?? []) option.disabled = Boolean(option.value) && !data.axes[option.value];
  return complete;
}

// ---- the reader's choices: the form shows them, and the address of the page keeps them

const form = document.getElementById("view");
const said = () => [...new FormData(form ?? undefined)].filter(([, value]) => value && value !== "0");
function choice() {
  const { x, smooth, log, seeds, pin } = Object.fromEntries(said());
  if (form) form.querySelector("output").textContent = form.smooth.value;
  return { x, smooth: Number(smooth ?? 0), log: Boolean(log), apart: Boolean(seeds), pin };
}
form?.addEventListener("input", () => {
  const address = `${location.pathname}?${new URLSearchParams(said())}`.replace(/\?$/, "");
  history.replaceState(null, "", address + location.hash);
  [...rooms.keys()].forEach(showAll);
  document.dispatchEvent(new CustomEvent("view", { detail: address }));
});

document.addEventListener("keydown", walk);
const again = () => [...plots].forEach(([figure, { chart }]) => draw(figure, chart)); // loops over a copy, since draw() moves its figure to the end of the map
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
// Printing draws the charts again: dark on white, and in a higher resolution.
for (const [event, factor] of [["beforeprint", 3], ["afterprint", 1]]) {
  addEventListener(event, () => {
    fine = factor;
    document.documentElement.toggleAttribute("data-print", factor > 1);
    again();
  });
}

const saved = document.getElementById("saved-charts");
if (saved) {
  // In a saved page no service fills the form from the address, so this does.
  for (const [name, value] of form ? new URLSearchParams(location.search) : []) {
    const field = form.elements[name];
    if (field) field.type === "checkbox" ? (field.checked = true) : (field.value = value);
  }
  rooms.set(document, JSON.parse(saved.textContent));
  showAll(document);
}
