
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = document.getElementById("seed").content.firstElementChild.namespaceURI;

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function shape(tag, attributes = {}, text = "") {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
}

/** A number as a reader wants it: four significant digits unless told, powers of ten only where they help. */
function format(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return power(value, digits - 2);
  return Number(value.toPrecision(digits)).toLocaleString("en-US", { maximumFractionDigits: 8 }).replace("-", "−");
}

function power(value, decimals) {
  const [mantissa, exponent] = value.toExponential(decimals).split("e");
  return `${String(Number(mantissa))}e${Number(exponent)}`.replaceAll("-", "−");
}

/** The round step, 1, 2 or 5 times a power of ten, that cuts a span into at most the wanted parts. */
function roundStep(span, wanted) {
  const raw = span / wanted, unit = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((m) => m * unit).find((s) => s >= raw * 0.999);
}

/** Multiples of step within [low, high]. */
function multiples(low, high, step) {
  const marks = [];
  for (let i = Math.ceil(low / step - 1e-6); i * step <= high + step * 1e-6; i++) marks.push(Number((i * step).toPrecision(12)));
  return marks;
}

/** Tick labels that tell neighbours apart. */
function tickText(tick, step) {
  const size = Math.abs(tick);
  if (tick === 0) return "0";
  if (step < 1e-5 && size < 1e-2 || step >= 1e5 || step < 1e-3 && size < 1e-1) return power(tick, Math.max(0, Math.min(3, Math.floor(Math.log10(size / step) + 1e-9))));
  return tick.toLocaleString("en-US", { minimumFractionDigits: Math.max(0, Math.min(8, -Math.floor(Math.log10(step) + 1e-9))), maximumFractionDigits: 8 }).replace("-", "−");
}

function decades(low, high) {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((to - from) / 4));
  const marks = [];
  for (let p = from; p <= to; p += every) marks.push(10 ** p);
  return marks;
}

class Chart {
  constructor(figure, spec) {
    this.figure = figure;
    this.spec = spec;
    this.lines = spec.lines.map(([index, label], order) => ({ ...DATA.series[index], label, order }));
    this.steps = [...new Set(this.lines.flatMap((line) => line.step))].sort((a, b) => a - b);
    this.at = null;
    this.domain();
    this.legend = figure.querySelector(".legend");
    this.plot = figure.querySelector(".plot");
    this.svg = shape("svg", { tabindex: "0", role: "img", "aria-label": this.words() });
    this.plot.append(this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.select(null));
    this.svg.addEventListener("blur", () => this.select(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => requestAnimationFrame(() => this.draw())).observe(this.plot);
    this.select(null);
  }

  domain() {
    const rate = this.lines.some((line) => line.n);
    const values = this.lines.flatMap((line) => [...line.value, ...(line.low || []), ...(line.high || [])]).filter((v) => v !== null);
    this.log = this.spec.log && values.length > 0 && values.every((v) => v > 0);
    let low = Math.min(...values), high = Math.max(...values);
    if (!values.length) [low, high] = [0, 1];
    if (rate) [low, high] = [0, 1];
    if (this.log) {
      this.yTicks = decades(low, high * 1.0001);
      [low, high] = [Math.min(low, this.yTicks[0]), Math.max(high, this.yTicks[this.yTicks.length - 1])];
    } else {
      if (low >= 0 && low < 0.35 * high) low = 0;
      if (high - low < 1e-9 * Math.abs(high) || high === low) { low -= Math.abs(low) * 0.1 || 1; high += Math.abs(high) * 0.1 || 1; }
      const step = roundStep(high - low, rate ? 2 : 3);
      low = Math.floor(low / step + 1e-6) * step;
      high = Math.ceil(high / step - 1e-6) * step;
      this.tickStep = step;
      this.yTicks = multiples(low, high, step);
    }
    this.low = low;
    this.high = high;
    const range = Math.max(...values) - Math.min(...values), size = Math.max(...values.map(Math.abs));
    this.digits = this.log || !(range > 0) ? 4 : Math.min(6, Math.max(4, 2 + Math.ceil(Math.log10(size / range))));
  }

  words() {
    return `${this.spec.title}. ` + this.lines.map((line) => {
      const last = line.step.length - 1;
      return `${line.label}: ${format(line.value[0], this.digits)} at step ${line.step[0]}, ${format(line.value[last], this.digits)} at step ${line.step[last]}`;
    }).join("; ");
  }

  draw() {
    const width = Math.max(220, this.plot.clientWidth), height = 168;
    const box = { left: 54, right: width - 8, top: 10, bottom: height - 22 };
    const [first, last] = [this.steps[0], this.steps[this.steps.length - 1]];
    const span = last - first || 1;
    this.x = (step) => (last === first ? (box.left + box.right) / 2 : box.left + ((step - first) / span) * (box.right - box.left));
    const scale = this.log ? Math.log : (v) => v;
    const [low, high] = [scale(this.low), scale(this.high)];
    this.y = (value) => box.bottom - ((scale(value) - low) / (high - low)) * (box.bottom - box.top);
    this.box = box;
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    for (const tick of this.yTicks) {
      this.svg.append(shape("line", { class: "grid", x1: box.left, x2: box.right, y1: this.y(tick), y2: this.y(tick) }));
      this.svg.append(shape("text", { x: box.left - 6, y: this.y(tick) + 3.5, "text-anchor": "end" }, this.log ? power(tick, 0) : tickText(tick, this.tickStep)));
    }
    const marks = last === first ? [first] : multiples(first, last, Math.max(1, roundStep(span, Math.min(6, Math.max(2, width / 80)))));
    for (const mark of marks) this.svg.append(shape("text", { x: this.x(mark), y: height - 6, "text-anchor": mark === last && last !== first ? "end" : "middle" }, String(mark)));
    this.svg.append(shape("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
    for (const line of this.lines) this.drawLine(line);
    this.cursor = shape("g");
    this.svg.append(this.cursor);
    if (this.at !== null) this.drawCursor();
  }

  drawLine(line) {
    const group = shape("g", { class: `k${line.order % 8}` });
    if (line.n) {
      const known = line.step.map((_, i) => i).filter((i) => line.low[i] !== null && line.high[i] !== null);
      const upper = known.map((i) => `${this.x(line.step[i])},${this.y(line.high[i])}`);
      const lower = known.map((i) => `${this.x(line.step[i])},${this.y(line.low[i])}`).reverse();
      if (known.length > 1) group.append(shape("polygon", { class: "band", points: [...upper, ...lower].join(" ") }));
      else for (const i of known) group.append(shape("path", { class: "line", d: `M${this.x(line.step[i])} ${this.y(line.low[i])}V${this.y(line.high[i])}`, opacity: ".4" }));
    }
    let path = "", drawing = false, points = 0;
    line.step.forEach((step, i) => {
      if (line.value[i] === null) { drawing = false; return; }
      path += `${drawing ? "L" : "M"}${this.x(step).toFixed(1)} ${this.y(line.value[i]).toFixed(1)}`;
      drawing = true;
      points += 1;
    });
    const dash = line.order >= 8 ? { "stroke-dasharray": "5 3" } : {};
    group.append(shape("path", { class: "line", d: path, ...dash }));
    if (points <= 12) line.step.forEach((step, i) => {
      if (line.value[i] !== null) group.append(shape("circle", { class: "dot", cx: this.x(step), cy: this.y(line.value[i]), r: 2.6 }));
    });
    this.svg.append(group);
  }

  point(event) {
    const bounds = this.svg.getBoundingClientRect();
    const x = event.clientX - bounds.left;
    this.select(this.steps.reduce((best, step) => (Math.abs(this.x(step) - x) < Math.abs(this.x(best) - x) ? step : best)));
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    const here = this.at === null ? (move < 0 ? this.steps.length : -1) : this.steps.indexOf(this.at);
    this.select(this.steps[Math.min(this.steps.length - 1, Math.max(0, here + move))]);
  }

  select(step) {
    this.at = step;
    this.legend.replaceChildren(...this.lines.map((line) => this.entry(line, step)));
    const shown = step === null ? this.steps[this.steps.length - 1] : step;
    this.legend.append(element("span", { class: "at" }, step === null ? `last, step ${shown}` : `step ${shown}`));
    if (this.cursor) this.drawCursor();
  }

  entry(line, step) {
    const index = step === null ? line.step.length - 1 : line.step.indexOf(step);
    let text = index < 0 ? "–" : format(line.value[index], this.digits);
    if (index >= 0 && line.n && line.value[index] !== null) {
      const [rate, low, high] = [line.value, line.low, line.high].map((of) => of[index].toFixed(3));
      text = `${rate} (${low}–${high}, n ${format(line.n[index])})`;
    }
    const swatch = element("span", { class: `swatch k${line.order % 8}${line.order >= 8 ? " dashed" : ""}` });
    const name = this.lines.length > 1 || line.label !== line.name ? `${line.label} ` : "";
    return element("span", { title: line.name }, swatch, name, element("b", {}, text));
  }

  drawCursor() {
    this.cursor.replaceChildren();
    if (this.at === null) return;
    const x = this.x(this.at);
    this.cursor.append(shape("line", { class: "cursor", x1: x, x2: x, y1: this.box.top, y2: this.box.bottom }));
    for (const line of this.lines) {
      const index = line.step.indexOf(this.at);
      if (index >= 0 && line.value[index] !== null) this.cursor.append(shape("circle", { class: `dot k${line.order % 8}`, cx: x, cy: this.y(line.value[index]), r: 3.6 }));
    }
  }
}

for (const figure of document.querySelectorAll("figure[data-chart]")) new Chart(figure, DATA.charts[Number(figure.dataset.chart)]);
