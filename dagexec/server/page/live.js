// The live page: it asks for the state of the server every second, while it is seen, and shows what has changed.
const CALM = matchMedia("(prefers-reduced-motion: reduce)");
const KEPT_SECONDS = 60, RATE_SECONDS = 5;
const TOKEN = "dagexec-token"; // kept by the browser for this tab alone
const find = (selector) => document.querySelector(selector);
const percent = (share) => `${Math.round(share * 100)}%`;
const rate = (value) => value === 0 ? "0" : value < 10 ? value.toFixed(1) : count(Math.round(value));
const megabytes = (bytes) => `${count(Math.round(bytes / 1e6))} MB`;
const clock = (moment) => new Date(moment * 1000).toLocaleTimeString("en-GB");

// A hue for a name, the same on all parts of the page.
const hues = new Map();
function hueOfName(name) {
  if (!hues.has(name)) hues.set(name, hueOf(hues.size + 1));
  return hues.get(name);
}

// A table that is filled while it is open.
function liveTable(title, columns) {
  const body = html("tbody"), place = html("div", { class: "table", tabindex: "0", role: "region", "aria-label": title });
  const element = html("details", {}, html("summary", {}, title), place);
  let rows = [];
  const fill = () => {
    if (!element.open) return;
    body.replaceChildren(...rows.map((row) => html("tr", {}, ...row.map((cell) =>
      html("td", typeof cell === "number" ? { class: "number" } : {}, typeof cell === "number" ? written(cell) : cell)))));
  };
  place.append(html("table", {}, html("thead", {}, html("tr", {}, ...columns.map((name) => html("th", { scope: "col" }, name)))), body));
  element.addEventListener("toggle", fill);
  return { element, update: (more) => { rows = more; fill(); } };
}

// Set a text only where it changes, so that nothing is announced, and no selection lost, without a reason.
function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// What is known of one model: its latest state, and those of the last minute.
class Model {
  constructor(row) {
    this.samples = [];
    this.figures = new Map();
    this.title = html("h3");
    this.state = html("p");
    this.list = html("dl");
    this.extra = html("div");
    this.card = html("article", { class: "card" }, this.title, this.state, this.list);
    this.card.style.setProperty("--hue", hueOfName(row.name));
    this.title.append(row.name, " ", html("span", { class: "path" }, row.version && `version ${row.version}`));
    if (row.state !== "READY") return;
    this.draws = [
      this.chart("requests a second", (one, before) => (one.success[0] + one.fail[0] - before.success[0] - before.fail[0]) / (one.at - before.at)),
      ...(row.queued === undefined ? [] : [this.chart("waiting", (one) => one.queued)]),
    ];
    this.card.append(this.extra);
  }

  chart(title, value) {
    this.card.append(html("h4", {}, `${title}, last minute`));
    return chart(this.card, 52, title, (drawing, width) => {
      const points = this.samples.slice(1).map((one, place) => [one.at, value(one, this.samples[place])]);
      const now = this.samples.at(-1)?.at ?? 0, most = Math.max(2, ...points.map(([, one]) => one));
      const x = (at) => 44 + (width - 46) * (1 - (now - at) / KEPT_SECONDS), y = (one) => 46 - 40 * one / most;
      axisBeside(drawing, [0, most], y, { left: 44, right: width - 2, unit: "", most: 3 });
      if (!points.length) return;
      const line = points.map(([at, one]) => `${x(at).toFixed(1)} ${y(one).toFixed(1)}`).join("L");
      drawing.append(svg("path", { class: "below", d: `M${x(points[0][0])} 46L${line}L${x(now)} 46Z` }), svg("path", { class: "curve", d: `M${line}` }));
    });
  }

  // What came between now and so many seconds ago, or as long as it is known.
  since(length) {
    const last = this.samples.at(-1);
    const inside = this.samples.findIndex((one) => one.at >= last.at - length - 0.5);
    const first = this.samples[Math.max(0, Math.min(inside, this.samples.length - 2))]; // a slow page may have asked long ago
    const requests = last.success[0] - first.success[0], failed = last.fail[0] - first.fail[0], took = last.at - first.at;
    return { first, rate: took > 0 ? (requests + failed) / took : 0, failed, mean: requests ? (last.success[1] - first.success[1]) / requests : null };
  }

  update(row, at) {
    this.row = row;
    say(this.state, row.state === "READY" ? "" : `${row.state.toLowerCase()}${row.reason ? `: ${row.reason}` : ""}`);
    this.state.hidden = row.state === "READY";
    if (row.state !== "READY") return;
    this.samples.push({ at, ...row });
    while (this.samples[0].at < at - KEPT_SECONDS) this.samples.shift();
    const lately = this.lately = this.since(RATE_SECONDS);
    const bad = this.since(KEPT_SECONDS).failed > 0;
    this.figure("requests/s", rate(lately.rate));
    this.figure("mean time", lately.mean === null ? "–" : seconds(lately.mean));
    if (row.latency) this.figure("slowest 1%", row.latency[1] === null ? "–" : seconds(row.latency[1]));
    if (row.queued !== undefined) this.figure("waiting", String(row.queued), row.most_queued ? ` of ${row.most_queued}` : "");
    this.figure("running", String(row.running), row.replicas === undefined ? "" : ` on ${row.replicas}`);
    this.figure("failed", count(row.fail[0]), "", bad);
    if (row.sequences) this.figure("sequences", count(row.sequences));
    for (const draw of this.draws) draw();
    this.showExtra(row);
  }

  figure(label, value, detail = "", bad = false) {
    if (!this.figures.has(label)) {
      const text = html("dd"), more = html("small");
      this.figures.set(label, [text, text.appendChild(html("span")), text.appendChild(more)]);
      this.list.append(html("div", {}, html("dt", {}, label), text));
    }
    const [whole, number, rest] = this.figures.get(label);
    say(number, value);
    say(rest, detail);
    whole.classList.toggle("bad", bad);
  }

  showExtra(row) {
    if (row.places) {
      if (!this.places) {
        this.places = liveTable(`Its ${row.places.length} replicas`, ["replica", "where", "is", "requests", "of all", "restarts"]);
        this.places.element.open = true;
        this.extra.append(this.places.element);
      }
      this.places.update(row.places.map((one) => [one.number, one.place, one.phase, one.outstanding, one.begun, one.restarts]));
    }
    if (row.most_rows > 1) this.showBatches(row.batches);
  }

  showBatches(batches) {
    const before = this.samples[0].batches, lately = new Map();
    for (const [rows, runs] of Object.entries(batches)) if (runs > (before[rows] ?? 0)) lately.set(rows, runs - (before[rows] ?? 0));
    const shown = lately.size ? lately : new Map(Object.entries(batches));
    const sizes = [...shown].sort((a, b) => b[1] - a[1]).slice(0, 8).sort((a, b) => a[0] - b[0]);
    const whole = [...shown.values()].reduce((sum, one) => sum + one, 0);
    const list = html("ul", {}, ...sizes.map(([rows, runs]) => {
      const share = html("span", { class: "share", "aria-hidden": "true" });
      share.style.width = percent(runs / whole);
      return html("li", {}, html("span", {}, `${rows} row${rows === "1" ? "" : "s"}`), html("span", {}, share), html("span", {}, percent(runs / whole)));
    }));
    this.batches ??= this.extra.appendChild(html("div"));
    this.batches.replaceChildren(html("h4", {}, whole ? `sizes of runs, ${lately.size ? "last minute" : "since it was loaded"}` : "sizes of runs: none yet"), list);
  }

  asRow() {
    const { row, lately } = this, of = (value) => value ?? "";
    if (row.state !== "READY") return [row.name, row.version, row.state.toLowerCase(), "", "", "", "", "", ""];
    return [row.name, row.version, "ready", Number(lately.rate.toFixed(1)), lately.mean === null ? "" : seconds(lately.mean), of(row.queued), row.running, row.success[0], row.fail[0]];
  }
}

const OUTCOMES = { completed: "", failed: "failed", invalid: "refused", rejected: "no room", timed_out: "timed out", cancelled: "given up" };
const PARTS = [["waiting", "waits for a replica, or for others to join"], ["inputs", "inputs are copied, and new shapes prepared"],
  ["running", "the net runs"], ["results", "results are copied"], ["outside", "outside of runs"]];

// Requests that took long, each a bar of its time that opens to a table of its runs.
function slowIn(place) {
  const requests = new Map();
  const model = html("select", { "aria-label": "Of which model" }, html("option", { value: "" }, "all models"));
  const order = html("select", { "aria-label": "Order" }, html("option", { value: "seconds" }, "slowest first"), html("option", { value: "number" }, "latest first"));
  const list = html("div"), none = html("p", {}, "None yet.");
  let most = 10;
  const all = button("", "Show all", () => { most = Infinity; show(); });
  place.append(html("div", { class: "bar" }, model, order), legend(...PARTS.map(([kind, text]) => [{ class: kind }, text])), none, list, all);
  for (const choice of [model, order]) choice.addEventListener("change", show);

  function take(state) {
    const kept = new Set(state.kept), offset = state.time - state.now;
    for (const number of requests.keys()) if (!kept.has(number)) requests.delete(number);
    for (const one of state.slow) requests.set(one.number, { ...one, came: one.began + offset, element: null });
    const names = [...new Set([...requests.values()].map((one) => one.model))].sort();
    if (names.join("\n") !== [...model.options].slice(1).map((one) => one.value).join("\n")) {
      const chosen = model.value;
      model.replaceChildren(model.options[0], ...names.map((name) => html("option", { value: name }, name)));
      model.value = names.includes(chosen) ? chosen : "";
    }
    show();
  }

  function show() {
    const found = [...requests.values()].filter((one) => !model.value || one.model === model.value).sort((a, b) => b[order.value] - a[order.value]);
    const shown = found.slice(0, most);
    all.hidden = shown.length === found.length;
    say(all, `All ${found.length}`);
    const longest = Math.max(...shown.map((one) => one.seconds));
    none.hidden = shown.length > 0;
    shown.forEach((one, number) => {
      one.element ??= rowOf(one);
      one.element.querySelector("svg").setAttribute("viewBox", `0 0 ${1000 * longest / one.seconds} 10`);
      if (list.children[number] !== one.element) list.insertBefore(one.element, list.children[number] ?? null);
    });
    while (list.children.length > shown.length) list.lastChild.remove();
  }

  function rowOf(one) {
    const how = OUTCOMES[one.outcome] ?? one.outcome, bar = svg("svg", { preserveAspectRatio: "none", "aria-hidden": "true" });
    const rectangle = (kind, from, until) => {
      if (until - from > one.seconds / 2000) bar.append(svg("rect", { class: kind, x: 1000 * from / one.seconds, y: 1, width: 1000 * (until - from) / one.seconds, height: 8 }));
    };
    rectangle("outside", 0, one.seconds);
    for (const run of one.runs) {
      const [created, begun, fed, ran, ended] = run.slice(0, 5).map((time) => time === null ? null : time - one.began);
      rectangle("waiting", created, begun);
      rectangle("inputs", begun, fed ?? ended);
      if (fed !== null) rectangle("running", fed, ran ?? ended);
      if (ran !== null) rectangle("results", ran, ended);
    }
    const name = html("strong", {}, one.model);
    if (how) name.append(" ", html("span", { class: "bad" }, how));
    const element = html("details", { class: "request" }, html("summary", {}, html("span", {}, clock(one.came)), name,
      html("span", { class: "number" }, seconds(one.seconds)), html("span", { class: "times" }, bar)));
    element.addEventListener("toggle", () => {
      if (element.open && element.childElementCount === 1) element.append(detailsOf(one, how));
    });
    return element;
  }

  function detailsOf(one, how) {
    const part = (from, until) => from === null || until === null ? "" : seconds(Math.max(0, until - from));
    const rows = one.runs.map(([created, begun, fed, ran, ended, size, thread], number) =>
      [number + 1, part(one.began, created), part(created, begun), part(begun, fed), part(fed, ran), part(ran, ended), size, thread]);
    return html("div", { class: "panel" },
      definitions([["version", one.version], ...(one.id ? [["id", one.id]] : []), ["ended", how || "completed"], ...(one.error ? [["because", one.error]] : []),
        ...(one.more ? [["more runs", written(one.more)]] : [])]),
      rows.length ? filledTable(["run", "came after", "waited", "inputs", "ran", "results", "rows", "thread"], rows)
        : html("p", {}, "Nothing is known of its runs: they were elsewhere, or there were none."));
  }

  return { take, forget: () => requests.clear() };
}

const models = new Map();
const cards = html("div", { class: "cards" }), asTable = liveTable("All models as a table",
  ["model", "version", "state", "requests a second", "mean time", "waiting", "running", "answered", "failed"]);
find("#models").append(cards, asTable.element);
const lanes = lanesIn(find("#threads")), slow = slowIn(find("#slow"));
let last = null, timer = 0, failures = 0, turn = 0;

function show(state) {
  const length = last === null ? 0 : state.now - last.now;
  const rows = state.models.map((row) => [`${row.name}\n${row.version}\n${row.state === "READY"}`, row]);
  const present = new Set(rows.map(([key]) => key));
  for (const [key, model] of models) {
    if (present.has(key)) continue;
    model.card.remove();
    models.delete(key);
  }
  for (const [key, row] of rows) {
    if (!models.has(key)) {
      models.set(key, new Model(row));
      cards.append(models.get(key).card);
    }
    models.get(key).update(row, state.now);
  }
  asTable.update([...models.values()].map((model) => model.asRow()));
  const threads = lanes.take(state, length || 1);
  slow.take(state);
  showSummary(state, length, threads);
  last = state;
  document.documentElement.dataset.drawn = String(Number(document.documentElement.dataset.drawn ?? 0) + 1);
}

function showSummary(state, length, threads) {
  const ready = [...models.values()].filter((model) => model.row.state === "READY");
  const others = state.models.filter((row) => row.state !== "READY").map((row) => `${row.name} is ${row.state.toLowerCase()}`);
  document.title = `${state.server}: live`;
  say(find("h1"), state.server);
  say(find(".verdict"), `${ready.length === 1 ? "One model serves" : `${ready.length} models serve`}${others.length ? `; ${others.join(", ")}` : ""}.`);
  const sum = (of) => ready.reduce((total, model) => total + of(model), 0);
  const cpu = last === null || !length ? null : (state.process.cpu - last.process.cpu) / length;
  const slowest = Math.max(0, ...ready.map((model) => model.row.latency?.[1] ?? 0));
  showFigures([
    [rate(sum((model) => model.lately.rate)), "requests a second"],
    [count(sum((model) => model.row.queued ?? 0)), "waiting"],
    [count(sum((model) => model.row.running)), "running"],
    [slowest ? seconds(slowest) : "–", "slowest 1%"],
    [cpu === null ? "–" : percent(cpu / state.process.cores), `of ${state.process.cores} cores`],
    ...(state.process.memory === null ? [] : [[megabytes(state.process.memory), "memory"]]),
  ]);
  const about = find("footer dl"), facts = [["dagexec", state.version], ["serves since", new Date(state.started * 1000).toLocaleString("en-GB")]];
  if (!about.children.length) about.append(...definitions(facts).children);
}

function showFigures(figures) {
  const place = find(".figures");
  figures.forEach(([value, label], number) => {
    if (!place.children[number]) place.append(html("div", {}, html("dt", {}, label), html("dd", { class: "value" })));
    say(place.children[number].querySelector("dt"), label);
    say(place.children[number].querySelector("dd"), value);
  });
}

async function look() {
  clearTimeout(timer);
  const mine = turn += 1; // what an earlier one still waits for comes too late
  if (isPaused() || document.hidden) return;
  const token = sessionStorage.getItem(TOKEN);
  try {
    const asked = last === null ? "" : `?stretch=${last.stretch}&request=${last.request}`;
    const answer = await fetch(`live.json${asked}`, { headers: token ? { Authorization: `Bearer ${token}` } : {}, cache: "no-store", signal: AbortSignal.timeout(10000) });
    if (mine !== turn) return;
    if (answer.status === 401) {
      askForToken(token !== null);
      return;
    }
    if (!answer.ok) throw new Error(`it answers with status ${answer.status}`);
    const state = await answer.json();
    if (mine !== turn) return;
    if (last !== null && state.started !== last.started) forget();
    failures = 0;
    document.body.classList.remove("old");
    show(state);
  } catch (error) {
    if (mine !== turn) return;
    failures += 1;
    document.body.classList.add("old");
    say(find(".verdict"), `The server does not answer${last === null ? "" : ` since ${clock(last.time)}`}: it is asked again.`);
    if (!(error instanceof TypeError || error instanceof DOMException)) console.warn(error);
  }
  timer = setTimeout(look, (CALM.matches ? 3000 : 1000) * Math.min(2 ** failures, 8));
}

// Another process serves now.
function forget() {
  last = null;
  for (const model of models.values()) model.card.remove();
  models.clear();
  lanes.forget();
  slow.forget();
  find("footer dl").replaceChildren();
}

function askForToken(isWrong) {
  sessionStorage.removeItem(TOKEN);
  find("form").hidden = false;
  say(find(".verdict"), isWrong ? "The server does not take this token." : "This server wants a token.");
  find("#token").focus();
}

find("form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, find("#token").value.trim());
  find("#token").value = "";
  find("form").hidden = true;
  look();
});
const isPaused = () => find("#pause").getAttribute("aria-pressed") === "true";
find("#pause").addEventListener("click", () => {
  find("#pause").setAttribute("aria-pressed", String(!isPaused()));
  look();
});
document.addEventListener("visibilitychange", look);
look();
