// Pure functions that apply a reader's choices to a chart: the x axis, seeds together or apart, log scale, smoothing.
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const known = (value) => value !== null && value !== undefined;

/** Exponential moving average s_t = w s_{t-1} + (1 - w) y_t with s_0 = 0, divided by 1 - w^t; gaps stay gaps. */
export function smoothed(y, weight) {
  let sum = 0, mass = 0;
  return y.map((value) => {
    if (!known(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

/** Join the curves of several seeds: at each x the mean, lowest and highest of the seeds that have a value there. */
export function joined(curves, name) {
  const each = (reduce, key = "y") => curves[0].y.map((_, at) => {
    const values = curves.filter(({ y }) => known(y[at])).map((curve) => curve[key][at]);
    return values.length ? reduce(values) : null;
  });
  return { ...curves[0], label: name, x: each(mean, "x"), y: each(mean), low: each((values) => Math.min(...values)), high: each((values) => Math.max(...values)) };
}

// Puts all curves on one common x, which uPlot needs; a curve gets a gap where it has no point.
function aligned(curves) {
  const places = curves.map(({ x, y }) => new Map(x.flatMap((at, index) => (known(y[index]) ? [[at, index]] : []))));
  const x = [...new Set(places.flatMap((place) => [...place.keys()]))].sort((a, b) => a - b);
  const fit = (values, place) => x.map((at) => values[place.get(at)] ?? null);
  return [x, curves.map((curve, index) => {
    const columns = Object.entries(curve).filter(([, values]) => Array.isArray(values));
    return { ...curve, ...Object.fromEntries(columns.map(([key, values]) => [key, fit(values, places[index])])), x };
  })];
}

/**
 * Return the chart to draw, in the form of pages/series.py: with `x` in the chosen `unit`, and smoothed curves with their
 * values before smoothing as `raw`. Curves of separate points (`dots`), such as evaluations, are not smoothed.
 */
export function shown(chart, { groups = [], at = [], axes = {} }, { x, smooth, log, apart }) {
  if (chart.unit !== "iteration") return chart;
  const axis = axes[x], index = new Map(at.map((iteration, place) => [iteration, place]));
  let curves = chart.curves.map((curve) => ({ ...curve, x: axis ? chart.x.map((one) => axis.x[curve.run][index.get(one)]) : chart.x }));
  for (const { name, runs } of apart ? [] : groups.filter((group) => group.runs.length > 1)) {
    const own = curves.filter(({ run }) => runs.includes(run));
    if (own.length > 1) curves = curves.flatMap((curve) => (curve === own[0] ? [joined(own, name)] : own.includes(curve) ? [] : [curve]));
  }
  if (smooth) curves = curves.map((curve) => {
    if (curve.dots) return curve;
    const columns = ["y", "low", "high"].filter((key) => curve[key]).map((key) => [key, smoothed(curve[key], smooth)]);
    return { ...curve, ...Object.fromEntries(columns), raw: curve.y };
  });
  const [places, fitted] = aligned(curves);
  const logarithmic = log && !chart.stacked && fitted.some(({ y }) => y.some((value) => value > 0));
  return { ...chart, unit: axis ? axis.name : chart.unit, x: places, curves: fitted, log: logarithmic };
}
