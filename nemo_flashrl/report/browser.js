// The browser of trajectories: a table that is filtered, sorted and paged, and the text of the chosen one.
const ROWS_OF_A_PAGE = 20;
const COLUMNS = ["step", "prompt_index", "reward", "advantage", "turns", "tokens", "action_tokens", "repeated_token_share", "staleness", "end_reason"];
const SHORT = { prompt_index: "prompt", action_tokens: "sampled", repeated_token_share: "repeated", end_reason: "end" };
// Numbers of steps and prompts are names, tokens are counted: none is rounded.
const shown = (value) => (Number.isInteger(value) ? String(value).replace("-", "−") : typeof value === "number" ? format(value) : value ?? "–");

function rowsOf(run, r) {
  const table = run.trajectories, out = [];
  for (let i = 0; i < table.step.length; i++) {
    const row = { run: r, sample: table.sample[i] };
    for (const name of COLUMNS) row[name] = table[name][i];
    row.end_reason = run.end_reasons[row.end_reason];
    out.push(row);
  }
  return out;
}

function textOf(row) { return row.sample < 0 ? null : RUNS[row.run].samples[row.sample]; }

function browser() {
  const all = RUNS.flatMap(rowsOf);
  if (!all.length) return;
  const view = { run: "", end: "", text: true, search: "", low: null, high: null, sort: "step", down: true, page: 0, chosen: null };
  const body = el("tbody"), pages = el("div", { class: "pages" }), head = el("tr");
  const detail = el("div", { id: "detail", tabindex: 0, "aria-label": "Chosen trajectory" }, el("p", { class: "note" }, "Choose a trajectory to read it."));
  let rows = [];

  const matches = (row) => {
    if (view.run !== "" && row.run !== Number(view.run)) return false;
    if (view.end && row.end_reason !== view.end) return false;
    if (view.text && row.sample < 0) return false;
    if (view.low !== null && row.reward < view.low) return false;
    if (view.high !== null && row.reward > view.high) return false;
    if (state.from !== null && row.step < state.from) return false;
    if (state.to !== null && row.step > state.to) return false;
    if (!view.search) return true;
    const sample = textOf(row);
    return sample !== null && sample.segments.some((segment) => segment.text.toLowerCase().includes(view.search));
  };
  const refresh = (page = 0) => {
    rows = all.filter(matches);
    const key = view.sort, sign = view.down ? -1 : 1;
    rows.sort((a, b) => (a[key] === b[key] ? a.prompt_index - b.prompt_index : a[key] === null ? 1 : b[key] === null ? -1 : a[key] < b[key] ? -sign : sign));
    view.page = Math.min(Math.max(page, 0), Math.max(Math.ceil(rows.length / ROWS_OF_A_PAGE) - 1, 0));
    paint();
  };
  const choose = (row, line) => {
    body.querySelectorAll("tr").forEach((other) => other.setAttribute("aria-selected", other === line));
    showDetail(detail, row);
  };
  const paint = () => {
    const names = RUNS.length > 1 ? ["run", ...COLUMNS] : COLUMNS, first = view.page * ROWS_OF_A_PAGE;
    head.replaceChildren(...names.map((name) => el("th", { "aria-sort": view.sort === name ? (view.down ? "descending" : "ascending") : "none" },
      el("button", { type: "button", onclick: () => { view.down = view.sort === name ? !view.down : true; view.sort = name; refresh(); } }, (SHORT[name] || name) + (view.sort === name ? (view.down ? " ↓" : " ↑") : "")))));
    body.replaceChildren(...rows.slice(first, first + ROWS_OF_A_PAGE).map((row) => {
      const cells = names.map((name) => el("td", {}, name === "run" ? RUNS[row.run].name : shown(row[name])));
      const line = el("tr", { tabindex: 0, onclick: () => choose(row, line), onkeydown: (event) => keys(event, line, row) }, ...cells);
      return line;
    }));
    const last = Math.max(Math.ceil(rows.length / ROWS_OF_A_PAGE) - 1, 0);
    pages.replaceChildren(el("button", { type: "button", disabled: view.page === 0, onclick: () => refresh(view.page - 1) }, "Previous"),
      el("span", {}, `page ${view.page + 1} of ${last + 1}, ${rows.length} of ${all.length} trajectories`),
      el("button", { type: "button", disabled: view.page === last, onclick: () => refresh(view.page + 1) }, "Next"));
  };
  const keys = (event, line, row) => {
    const next = { ArrowDown: line.nextElementSibling, ArrowUp: line.previousElementSibling }[event.key];
    if (event.key === "Enter" || event.key === " ") choose(row, line);
    else if (next) next.focus();
    else return;
    event.preventDefault();
  };
  const pick = (name, label, options) => el("label", {}, label + " ", el("select", { onchange: (event) => { view[name] = event.target.value; refresh(); } }, el("option", { value: "" }, "all"), ...options.map(([value, text]) => el("option", { value }, text))));
  const bound = (name, label) => el("input", { type: "number", step: "any", placeholder: label, "aria-label": label, oninput: (event) => { view[name] = event.target.value === "" ? null : Number(event.target.value); refresh(); } });
  const filters = el("div", { class: "filters", role: "search" },
    RUNS.length > 1 ? pick("run", "Run", RUNS.map((run, r) => [r, run.name])) : null,
    pick("end", "End", [...new Set(all.map((row) => row.end_reason))].sort().map((end) => [end, end])),
    el("label", {}, "Reward ", bound("low", "from"), " to ", bound("high", "to")),
    el("label", {}, el("input", { type: "checkbox", checked: true, onchange: (event) => { view.text = event.target.checked; refresh(); } }), " with text only"),
    el("label", {}, "Text has ", el("input", { type: "search", oninput: (event) => { view.search = event.target.value.toLowerCase(); refresh(); } })));
  const table = el("div", {}, el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), body)), pages);
  section("Trajectories", DATA.trajectory_note, filters, el("div", { class: "browser" }, table, detail));
  redraws.push(() => refresh(view.page));
  refresh();
}

function showDetail(detail, row) {
  const sample = textOf(row), numbers = COLUMNS.map((name) => el("div", {}, el("dt", {}, name.replaceAll("_", " ")), el("dd", {}, shown(row[name]))));
  const extra = sample && sample.info ? Object.entries(sample.info).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, typeof value === "object" ? JSON.stringify(value) : String(value)))) : [];
  const segments = sample === null ? [el("p", { class: "note" }, "No text for this trajectory; trainer.log_trajectories sets how many are logged per step.")] : sample.segments.map((segment) => {
    const action = segment.kind === "action", negative = action && segment.advantage < 0;
    return el("div", { class: `segment ${action ? "action" : ""} ${negative ? "negative" : ""}` },
      el("header", {}, el("span", {}, segment.kind), el("span", {}, `${segment.tokens} tokens`),
        action ? el("b", { class: segment.advantage > 0 ? "positive" : "" }, `advantage of each token ${format(segment.advantage)}`) : null,
        action ? el("span", {}, `mean log-prob ${format(segment.logprob)}`) : null), segment.text);
  });
  detail.replaceChildren(el("dl", {}, ...numbers, ...extra), ...segments);
  detail.scrollTop = 0;
}
