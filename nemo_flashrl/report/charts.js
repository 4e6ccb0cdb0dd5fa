"use strict";
// Charts as SVG: lines with bands, stacked areas; and a heat map on a canvas. Every text reaches the page as textContent.
const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { left: 52, right: 10, top: 8, bottom: 32 };
const HEIGHT = 200;
const DASHES = ["", "6 3", "2 3", "9 3 2 3", "1 3"];

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes = {}, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function format(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return +(value / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return +(value / 1e3).toPrecision(3) + "k";
  if (size !== 0 && size < 1e-3) return value.toExponential(1).replaceAll("-", "−");
  return String(+value.toPrecision(4)).replace("-", "−");
}

function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999) * power;
  const out = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) out.push(n * step);
  return out;
}

function extent(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const value of list) if (value !== null && Number.isFinite(value)) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low > high ? null : [low, high];
}

// A debiased exponential mean, as TensorBoard draws it; gaps stay gaps.
function smooth(values, weight) {
  let mean = 0, mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean * weight + value * (1 - weight);
    mass = mass * weight + 1 - weight;
    return mean / mass;
  });
}

function scales(width, xRange, yRange) {
  const span = xRange[1] - xRange[0] || 1, rise = yRange[1] - yRange[0] || 1;
  return {
    x: (value) => MARGIN.left + ((value - xRange[0]) / span) * (width - MARGIN.left - MARGIN.right),
    y: (value) => HEIGHT - MARGIN.bottom - ((value - yRange[0]) / rise) * (HEIGHT - MARGIN.top - MARGIN.bottom),
    step: (pixel) => xRange[0] + ((pixel - MARGIN.left) / (width - MARGIN.left - MARGIN.right)) * span,
  };
}

function axes(plot, width, scale, xRange, yRange, yTicks) {
  for (const value of yTicks) {
    plot.append(svg("line", { class: "gridline", x1: MARGIN.left, x2: width - MARGIN.right, y1: scale.y(value), y2: scale.y(value) }));
    plot.append(svg("text", { x: MARGIN.left - 7, y: scale.y(value) + 4, "text-anchor": "end" }, format(value)));
  }
  const base = HEIGHT - MARGIN.bottom;
  plot.append(svg("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: base, y2: base }));
  for (const value of ticks(xRange[0], Math.max(xRange[1], xRange[0] + 1), Math.max(2, width / 90)).filter(Number.isInteger)) {
    plot.append(svg("text", { x: scale.x(value), y: base + 15, "text-anchor": "middle" }, format(value)));
  }
  plot.append(svg("text", { x: width - MARGIN.right, y: HEIGHT - 3, "text-anchor": "end" }, "optimizer step"));
}

function path(xs, ys, scale) {
  let out = "", pen = "M";
  for (let i = 0; i < xs.length; i++) {
    if (ys[i] === null) { pen = "M"; continue; }
    out += pen + scale.x(xs[i]).toFixed(1) + " " + scale.y(ys[i]).toFixed(1);
    pen = "L";
  }
  return out;
}

function area(xs, lows, highs, scale) {
  const places = xs.map((_, i) => i).filter((i) => lows[i] !== null && highs[i] !== null);
  const point = (i, ys) => scale.x(xs[i]).toFixed(1) + " " + scale.y(ys[i]).toFixed(1);
  if (!places.length) return "";
  return "M" + places.map((i) => point(i, highs)).join("L") + "L" + places.reverse().map((i) => point(i, lows)).join("L") + "Z";
}

function yRangeOf(lists, from) {
  const found = extent(lists);
  if (!found) return [0, 1];
  let [low, high] = found;
  if (from === 0 && low > 0) low = 0;
  if (high - low <= 2e-5 * Math.max(Math.abs(low), Math.abs(high))) { const pad = Math.abs(low) * 0.1 || 1; return from === 0 && low === 0 ? [0, 1] : [low - pad, high + pad]; }
  const pad = (high - low) * 0.05;
  return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
}

// lines: [{label, color, dash, xs, raw, ys, lows, highs}]; ys is what is drawn, raw what is read out.
function drawLines(plot, width, lines, xRange, options) {
  const shown = lines.flatMap((line) => [line.ys, ...(line.lows ? [line.lows, line.highs] : [])]);
  const yRange = yRangeOf([...shown, options.limits || []], options.from), scale = scales(width, xRange, yRange);
  axes(plot, width, scale, xRange, yRange, ticks(yRange[0], yRange[1], 6));
  for (const limit of options.limits || []) {
    plot.append(svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: scale.y(limit), y2: scale.y(limit), stroke: "var(--bad)", "stroke-dasharray": "4 4" }));
  }
  for (const line of lines) {
    if (line.lows) plot.append(svg("path", { d: area(line.xs, line.lows, line.highs, scale), fill: line.color, opacity: 0.18 }));
    else if (line.raw !== line.ys) plot.append(svg("path", { class: "raw", d: path(line.xs, line.raw, clamped(scale, yRange)), fill: "none", stroke: line.color, opacity: 0.22 }));
  }
  for (const line of lines) {
    const alone = line.xs.length === 1;
    if (alone && line.ys[0] !== null) plot.append(svg("circle", { class: "curve", cx: scale.x(line.xs[0]), cy: scale.y(line.ys[0]), r: 3, fill: line.color }));
    else plot.append(svg("path", { class: "curve", d: path(line.xs, line.ys, scale), fill: "none", stroke: line.color, "stroke-width": 1.9, "stroke-dasharray": line.dash || "none", "stroke-linejoin": "round" }));
  }
  return scale;
}

// The faint raw curve may leave the range of the smoothed one; it is held at the edge.
function clamped(scale, yRange) {
  return { x: scale.x, y: (value) => scale.y(Math.min(Math.max(value, yRange[0]), yRange[1])) };
}

// layers: as lines, on top of each other.
function drawStack(plot, width, layers, xRange) {
  const xs = layers[0].xs, sums = xs.map(() => 0), bounds = layers.map((layer) => {
    const lows = sums.slice();
    layer.ys.forEach((value, i) => { sums[i] += value || 0; });
    return [lows, sums.slice()];
  });
  const yRange = [0, (extent([sums]) || [0, 1])[1] * 1.05 || 1], scale = scales(width, xRange, yRange);
  axes(plot, width, scale, xRange, yRange, ticks(0, yRange[1], 6));
  layers.forEach((layer, n) => plot.append(svg("path", { class: "curve", d: area(xs, ...bounds[n], scale), fill: layer.color, opacity: 0.82 })));
  return scale;
}

// columns: per step an array of shares by bin, the lowest bin first.
function drawHeat(canvas, width, steps, columns, yRange) {
  const ratio = window.devicePixelRatio || 1, context = canvas.getContext("2d");
  canvas.width = width * ratio; canvas.height = HEIGHT * ratio;
  context.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement), heat = style.getPropertyValue("--heat");
  const bins = columns[0].length, inner = width - MARGIN.left - MARGIN.right, tall = HEIGHT - MARGIN.top - MARGIN.bottom;
  columns.forEach((column, i) => column.forEach((share, bin) => {
    if (!share) return;
    context.fillStyle = `rgba(${heat}, ${0.12 + 0.88 * Math.sqrt(share)})`;
    const left = MARGIN.left + (i / columns.length) * inner;
    context.fillRect(left, MARGIN.top + tall * (1 - (bin + 1) / bins), inner / columns.length + 0.5, tall / bins + 0.5);
  }));
  context.fillStyle = style.getPropertyValue("--muted");
  context.font = "11.5px system-ui, sans-serif";
  context.textAlign = "right";
  for (const value of ticks(yRange[0], yRange[1], 6)) {
    context.fillText(format(value), MARGIN.left - 7, MARGIN.top + tall * (1 - (value - yRange[0]) / (yRange[1] - yRange[0])) + 4);
  }
  context.textAlign = "center";
  for (const step of ticks(steps[0], Math.max(steps[steps.length - 1], steps[0] + 1), Math.max(2, width / 90)).filter(Number.isInteger)) {
    const nearest = steps.findIndex((other) => other >= step);
    context.fillText(format(step), MARGIN.left + ((nearest + 0.5) / steps.length) * inner, HEIGHT - MARGIN.bottom + 15);
  }
  context.textAlign = "right";
  context.fillText("optimizer step", width - MARGIN.right, HEIGHT - 3);
}
