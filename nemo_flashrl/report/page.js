// What the page shows, from the data that the command wrote into it.
const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs, GROUPS = DATA.groups;
const color = (n) => `var(--c${n % 8})`;
const state = { hidden: new Set(), smoothing: 0.6, from: null, to: null, singles: false };
const redraws = [];

const SECTIONS = [
  ["Learning", "The band is min to max over seeds. Reward rising without success: read trajectories.", [
    { title: "Reward", of: ["reward_mean"] }, { title: "Success", of: ["success", "evaluation_success"], from: 0 },
    { title: "Reward std", of: ["reward_std", "group_reward_std"], from: 0 }, { heat: "reward_histogram", title: "Reward histogram" },
    { title: "Advantage std", of: ["advantage_std", "group_advantage_std"], from: 0 }, { title: "Tied groups (zero variance)", of: ["tied_groups"], from: 0 },
    { title: "Held-out success by class", prefix: "evaluation_success_", from: 0 }, { title: "Task classes: share", prefix: "curriculum_share_", from: 0 }]],
  ["Lengths and turns", "Length that grows with the reward may be skill or filler; repetition tells them apart.", [
    { title: "Response length", of: ["response_tokens", "response_tokens_max"], from: 0 }, { title: "Turns", of: ["turns"], from: 0 },
    { title: "Repeated tokens", of: ["repeated_token_share"], from: 0 }, { title: "Unique samples in groups", of: ["unique_sample_share"], from: 0, limits: [0.6] },
    { title: "Distinct answers", of: ["distinct_answers"], from: 0 }, { title: "Trajectory length", of: ["trajectory_tokens"], from: 0 }]],
  ["Gate and staleness", "Off-policyness: how far the sampler is from the policy that trains on its tokens.", [
    { title: "Gate acceptance", of: ["gate_acceptance"], from: 0 }, { title: "Sequence KL (D)", of: ["sequence_kl"], from: 0 },
    { title: "Staleness", of: ["staleness_mean", "staleness_max"], from: 0 }, { title: "Max importance ratio", of: ["ratio_max"] }, { title: "Mean importance ratio", of: ["ratio_mean"] },
    { title: "Log-prob difference, trainer vs. sampler", of: ["logprob_difference", "logprob_difference_max"], from: 0 }]],
  ["KL, entropy and optimizer", "How far the policy has moved, and how the optimizer step looks.", [
    { title: "KL to the reference", of: ["kl"] }, { title: "Entropy", of: ["entropy", "sampled_entropy"], from: 0 }, { title: "Grad norm", of: ["grad_norm"], from: 0 },
    { title: "Loss", of: ["loss"] }, { title: "Clip fraction", of: ["clip_fraction"], from: 0 }, { title: "Learning rate", of: ["learning_rate"], from: 0 },
    { title: "KL coefficient", of: ["beta"], from: 0 }, { title: "Distance to the reference", of: ["reference_distance"], from: 0 }, { title: "Temperature", of: ["temperature"] }, { title: "Group size", of: ["group_size"], from: 0 }]],
  ["Time and throughput", "Where a step spends its time, and who waits for whom.", [
    { stack: [["rollout_seconds", "rollouts"], ["train_seconds", "training"], ["refit_seconds", "weight sync"]], title: "Step time" },
    { title: "Training throughput", of: ["tokens_per_second"], from: 0 }, { title: "Rollout throughput", of: ["rollout_tokens_per_second"], from: 0 },
    { title: "Idle rollout slots", of: ["rollout_idle_seconds_during_training", "rollout_idle_seconds"], from: 0 }]],
  ["Memory, padding and batching", "How the hardware is used.", [
    { title: "Memory", of: ["memory_peak_gib", "memory_reserved_gib", "memory_total_gib"], from: 0 }, { title: "Padding", of: ["padding_share"], from: 0, limits: [0.1] },
    { title: "Action token share", of: ["action_token_share"], from: 0 }, { title: "Load imbalance", of: ["cost_imbalance", "microbatch_imbalance"], from: 0 },
    { title: "Microbatches per rank", of: ["microbatches"], from: 0 }, { title: "Token budget utilization", of: ["budget_use"], from: 0 }]],
  ["Episode ends and drops", "How episodes ended, and what was left out of training, by reason.", [
    { title: "Episodes by end reason", prefix: "episodes_", except: ["episodes_in_flight"], from: 0 }, { title: "Dropped", prefix: "dropped_", from: 0 },
    { title: "Truncated", prefix: "truncated_", also: ["observations_truncated"], from: 0 }]],
];

const visible = (group) => !state.hidden.has(group);
const unitOf = (name) => (DATA.metrics[name] || {}).unit || "";
const meaningOf = (name) => (DATA.metrics[name] || {}).meaning || "a plug-in's own metric";
const allNames = () => [...new Set(RUNS.flatMap((run) => Object.keys(run.series)))].sort();

function stepRange() {
  const found = extent(RUNS.map((run) => run.steps)) || [0, 1];
  return [state.from ?? found[0], Math.max(state.to ?? found[1], (state.from ?? found[0]) + 1)];
}

function cut(xs, ys) {
  const [first, last] = stepRange(), keep = xs.map((x) => x >= first && x <= last);
  return [xs.filter((_, i) => keep[i]), ys.filter((_, i) => keep[i])];
}

// Mean and span over the seeds of a group, on the steps that any of them has.
function overSeeds(runs, name) {
  const values = new Map();
  for (const run of runs) run.steps.forEach((step, i) => {
    const value = run.series[name][i];
    if (value !== null) values.set(step, [...(values.get(step) || []), value]);
  });
  const xs = [...values.keys()].sort((a, b) => a - b), at = (pick) => xs.map((x) => pick(values.get(x)));
  return [xs, at((v) => v.reduce((a, b) => a + b, 0) / v.length), at((v) => Math.min(...v)), at((v) => Math.max(...v))];
}

function linesOf(names) {
  const lines = [], single = GROUPS.length === 1;
  GROUPS.forEach((group, g) => {
    if (!visible(g)) return;
    names.forEach((name, n) => {
      const runs = group.runs.map((r) => RUNS[r]).filter((run) => run.series[name]);
      const paint = { color: color(single ? n : g), dash: single ? "" : DASHES[n % DASHES.length] };
      const title = single && names.length > 1 ? name : names.length > 1 ? `${group.name} · ${name}` : group.name;
      const add = (label, xs, raw, lows, highs) => {
        const [x, y] = cut(xs, raw), band = lows && [cut(xs, lows)[1], cut(xs, highs)[1]];
        const ys = state.smoothing ? smooth(y, state.smoothing) : y;
        if (x.length) lines.push({ label, name, ...paint, xs: x, raw: y, ys, ...(band && { lows: smooth(band[0], state.smoothing), highs: smooth(band[1], state.smoothing) }) });
      };
      if (!runs.length) return;
      if (runs.length > 1 && !state.singles) add(`${title} (${runs.length} seeds)`, ...overSeeds(runs, name));
      else runs.forEach((run) => add(runs.length > 1 ? `${title} · ${run.name}` : title, run.steps, run.series[name]));
    });
  });
  return lines;
}

function keyOf(line) {
  const swatch = svg("svg", { viewBox: "0 0 24 8", "aria-hidden": "true" });
  swatch.append(svg("line", { x1: 0, x2: 24, y1: 4, y2: 4, stroke: line.color, "stroke-width": 2.5, "stroke-dasharray": line.dash || "none" }));
  return el("span", { class: "key" }, swatch, line.label);
}

// A figure that draws itself when it comes into view, and again when something it shows has changed.
function figure(title, unit, meaning, draw) {
  const keys = el("div", { class: "keys" }), body = el("div");
  const node = el("figure", {}, el("h3", { title: meaning }, title, unit ? el("span", { class: "unit" }, ` · ${unit}`) : null), keys, body);
  let seen = false, stale = true;
  const paint = () => {
    stale = true;
    if (!seen || !node.clientWidth) return;
    stale = false;
    keys.replaceChildren(); body.replaceChildren();
    draw(keys, body, node.clientWidth - 28);
  };
  new IntersectionObserver((entries) => {
    seen = entries.some((entry) => entry.isIntersecting);
    if (seen && stale) paint();
  }, { rootMargin: "300px" }).observe(node);
  redraws.push(paint);
  return node;
}

function lineFigure(spec) {
  const known = allNames();
  const names = spec.prefix
    ? known.filter((n) => (n.startsWith(spec.prefix) || (spec.also || []).includes(n)) && !(spec.except || []).includes(n) && RUNS.some((r) => (r.series[n] || []).some((v) => v)))
    : spec.of.filter((name) => known.includes(name));
  if (!names.length) return null;
  const meaning = names.map((name) => `${name}: ${meaningOf(name)}`).join("\n");
  return figure(spec.title, unitOf(names[0]), meaning, (keys, body, width) => {
    const lines = linesOf(names), range = stepRange();
    keys.append(...lines.map(keyOf));
    if (!lines.length) return body.append(el("p", { class: "note" }, "Nothing to show: all runs are hidden."));
    const plot = svg("svg", { class: "plot", tabindex: 0, role: "img", "aria-label": describe(spec.title, lines), viewBox: `0 0 ${width} ${HEIGHT}` });
    readable(plot, lines, drawLines(plot, width, lines, range, spec), width);
    body.append(plot);
  });
}

function describe(title, lines) {
  const words = lines.slice(0, 8).map((line) => {
    const found = extent([line.raw]), last = line.raw[line.raw.length - 1];
    return `${line.label}: ${found ? `from ${format(found[0])} to ${format(found[1])}, last ${format(last)}` : "no value"}`;
  });
  return `${title}. ${words.join("; ")}. Arrow keys read single steps.`;
}

function stackFigures(spec) {
  return RUNS.map((run, r) => {
    if (!spec.stack.every(([name]) => run.series[name])) return null;
    return figure(RUNS.length > 1 ? `${spec.title}: ${run.name}` : spec.title, "s", "stacked; the top is the step time without held-out evaluation", (keys, body, width) => {
      const layers = spec.stack.map(([name, label], n) => {
        const [xs, raw] = cut(run.steps, run.series[name]);
        return { label, name, color: color(n), xs, raw, ys: smooth(raw, state.smoothing) };
      });
      keys.append(...layers.map(keyOf));
      if (!layers[0].xs.length) return;
      const plot = svg("svg", { class: "plot", tabindex: 0, role: "img", "aria-label": describe(spec.title, layers), viewBox: `0 0 ${width} ${HEIGHT}` });
      readable(plot, layers, drawStack(plot, width, layers, stepRange()), width);
      body.append(plot);
    });
  }).slice(0, 6);
}

function heatFigures(spec) {
  return RUNS.map((run) => {
    const heat = run[spec.heat];
    if (!heat) return null;
    return figure(RUNS.length > 1 ? `${spec.title}: ${run.name}` : spec.title, "reward", "darker: more of the step's trajectories", (keys, body, width) => {
      const [steps, columns] = cut(heat.steps, heat.shares), canvas = el("canvas", { role: "img", "aria-label": `${spec.title} over steps, ${format(heat.range[0])} to ${format(heat.range[1])}` });
      keys.append(el("span", {}, "share of the step's trajectories: faint few, full all"));
      body.append(canvas);
      if (columns.length) drawHeat(canvas, width, steps, columns, heat.range);
    });
  }).slice(0, 6);
}
