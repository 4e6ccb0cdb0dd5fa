// Reading values off a chart, the controls, and the order of the page.
function readable(plot, lines, scale, width) {
  const cross = svg("line", { y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, stroke: "var(--muted)", "stroke-dasharray": "3 3", visibility: "hidden" });
  const tip = document.getElementById("tooltip"), steps = [...new Set(lines.flatMap((line) => line.xs))].sort((a, b) => a - b);
  let place = steps.length - 1;
  plot.append(cross);
  const hide = () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); };
  const show = (index) => {
    place = Math.min(Math.max(index, 0), steps.length - 1);
    const step = steps[place], x = scale.x(step), box = plot.getBoundingClientRect();
    cross.setAttribute("x1", x); cross.setAttribute("x2", x); cross.setAttribute("visibility", "visible");
    const rows = lines.filter((line) => line.xs.includes(step)).map((line) => {
      const value = line.raw[line.xs.indexOf(step)], span = line.lows ? ` (${format(line.lows[line.xs.indexOf(step)])} … ${format(line.highs[line.xs.indexOf(step)])})` : "";
      return el("div", {}, keyOf(line), el("b", {}, format(value) + span));
    });
    tip.replaceChildren(el("div", {}, `step ${step}`), ...rows);
    tip.hidden = false;
    const left = box.left + (x / width) * box.width + 14;
    tip.style.left = Math.min(left, window.innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.max(8, Math.min(box.top + 6, window.innerHeight - tip.offsetHeight - 8)) + "px";
  };
  const nearest = (step) => steps.reduce((best, x, i) => (Math.abs(x - step) < Math.abs(steps[best] - step) ? i : best), 0);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    show(nearest(scale.step(((event.clientX - box.left) / box.width) * width)));
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("focus", () => plot.matches(":focus-visible") && show(place));
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const jump = { ArrowLeft: place - 1, ArrowRight: place + 1, PageUp: place - 20, PageDown: place + 20, Home: 0, End: steps.length - 1 }[event.key];
    if (event.key === "Escape") hide();
    if (jump === undefined) return;
    event.preventDefault();
    show(jump);
  });
}

function section(title, note, ...children) {
  const id = title.toLowerCase().replace(/[^a-z]+/g, "-");
  document.getElementById("sections").append(el("a", { href: "#" + id }, title));
  document.getElementById("main").append(el("section", { "aria-labelledby": id }, el("h2", { id }, title), note ? el("p", { class: "note" }, note) : null, ...children));
}

function drawAll() { redraws.forEach((draw) => draw()); }

function overview() {
  const last = (run, name) => {
    const values = (run.series[name] || []).filter((value) => value !== null).slice(-20);
    return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
  };
  const minutes = (run) => Math.round((run.series.step_seconds || []).reduce((a, b) => a + (b || 0), 0) / 60);
  const clock = (total) => `${Math.floor(total / 60)}:${String(total % 60).padStart(2, "0")}`;
  const columns = [["steps", (run) => format(run.steps.length)], ["reward", (run) => format(last(run, "reward_mean"))], ["success", (run) => format(last(run, "success"))],
    ["response tokens", (run) => format(last(run, "response_tokens"))], ["turns", (run) => format(last(run, "turns"))], ["gate acceptance", (run) => format(last(run, "gate_acceptance"))],
    ["tokens/s", (run) => format(last(run, "tokens_per_second"))], ["memory GiB", (run) => format(last(run, "memory_peak_gib"))], ["h:mm", (run) => clock(minutes(run))], ["findings", (run) => String(run.findings.length)]];
  const table = el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "run"), ...columns.map(([name]) => el("th", {}, name)))),
    el("tbody", {}, ...RUNS.map((run) => el("tr", {}, el("td", { title: run.folder }, run.name), ...columns.map(([, value]) => el("td", {}, value(run)))))));
  section("Overview", "Means over the last 20 steps.", el("div", { class: "scroll" }, table));
}

function findings() {
  const notes = RUNS.flatMap((run) => run.findings.map((finding) => el("details", { class: "finding", open: RUNS.length === 1 },
    el("summary", {}, el("b", {}, RUNS.length > 1 ? `${run.name}: ${finding.title}` : finding.title), ` · ${finding.evidence}`),
    el("p", {}, "Likely causes, most likely first:"), el("ol", {}, ...finding.causes.map((cause) => el("li", {}, cause))), el("p", {}, "Change: " + finding.change))));
  section("Findings", "Rules of flashrl doctor, over all steps of the run.", ...(notes.length ? notes : [el("p", { class: "healthy" }, "No rule of the doctor fires.")]));
}

function legend() {
  const bar = document.getElementById("legend");
  GROUPS.forEach((group, g) => {
    const swatch = el("i");
    swatch.style.background = color(g);
    bar.append(el("button", { class: "chip", type: "button", "aria-pressed": "true", title: group.runs.map((r) => RUNS[r].folder).join("\n"), onclick: (event) => {
      visible(g) ? state.hidden.add(g) : state.hidden.delete(g);
      event.currentTarget.setAttribute("aria-pressed", visible(g));
      drawAll();
    } }, GROUPS.length > 1 ? swatch : null, group.runs.length > 1 ? `${group.name} (${group.runs.length} seeds)` : group.name));
  });
}

function controls() {
  const at = (id) => document.getElementById(id), number = (id) => (at(id).value === "" ? null : Number(at(id).value));
  const apply = () => {
    state.smoothing = Number(at("smoothing").value); state.from = number("from"); state.to = number("to"); state.singles = at("singles").checked;
    at("smoothing-value").textContent = state.smoothing;
    drawAll();
  };
  at("singles-label").hidden = GROUPS.every((group) => group.runs.length < 2);
  at("controls").addEventListener("input", apply);
  at("controls").addEventListener("submit", (event) => event.preventDefault());
  at("controls").addEventListener("reset", () => setTimeout(apply));
  let waiting;
  window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(drawAll, 120); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  at("smoothing-value").textContent = state.smoothing;
}

function page() {
  legend();
  overview();
  findings();
  const used = new Set();
  for (const [title, note, specs] of SECTIONS) {
    const figures = specs.flatMap((spec) => {
      [...(spec.of || []), ...(spec.stack || []).map(([name]) => name)].forEach((name) => used.add(name));
      return spec.stack ? stackFigures(spec) : spec.heat ? heatFigures(spec) : [lineFigure(spec)];
    }).filter(Boolean);
    if (figures.length) section(title, note, el("div", { class: "grid" }, ...figures));
  }
  browser();
  const rest = allNames().filter((name) => !used.has(name) && !/^(episodes_|dropped_|truncated_)/.test(name) && name !== "step_seconds");
  if (rest.length) {
    const grid = el("div", { class: "grid" }, ...rest.map((name) => lineFigure({ title: name, of: [name] })));
    document.getElementById("main").append(el("details", { ontoggle: drawAll }, el("summary", {}, `All other metrics (${rest.length})`), grid));
  }
  controls();
  document.documentElement.dataset.ready = Math.round(performance.now());
}
page();
