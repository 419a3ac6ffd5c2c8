// What threads did in the last seconds, a lane for each. It follows the time, or stands where one has moved to.
const LANE_SECONDS = 30; // that are kept
const NARROWEST = 1e-4, WIDEST = 10;

function lanesIn(place) {
  const LANE = 34, TOP = 6, AXIS = 22;
  const lanes = new Map(), view = { length: WIDEST, end: null };
  let now = 0, width = 800;
  const bar = html("div", { class: "bar" });
  const drawing = svg("svg", { class: "drawing lanes", role: "group", tabindex: "0",
    "aria-label": "Threads over time: arrow keys move, plus and minus zoom, 0 follows the time; the table below has the figures" });
  const panel = html("div", { class: "panel", "aria-live": "polite" }, "Point at a stretch for what it is; the table has the sums.");
  const entries = html("div"), table = liveTable("These threads as a table", ["thread", "busy", "runs", "at work for"]);
  place.append(bar, drawing, entries, panel, table.element);
  const follows = button("Follow", "Show the last ten seconds", () => { view.end = null; view.length = WIDEST; draw(); });
  bar.append(button("+", "Zoom in", () => zoom(2)), button("−", "Zoom out", () => zoom(1 / 2)), follows);

  const end = () => view.end ?? now;
  const letters = () => Math.min(Math.floor(width / 36), Math.max(8, ...[...lanes.keys()].map((name) => name.length)));
  const left = () => 14 + 6.3 * letters();
  const x = (time) => left() + (time - end() + view.length) / view.length * (width - left() - 8);

  // Take the stretches of a state; those that go on have no end.
  function take(state, length) {
    now = state.now;
    for (const name of [...lanes.keys()].filter((one) => !(one in state.lanes))) lanes.delete(name);
    for (const [name, stretches] of Object.entries(state.lanes)) {
      if (!lanes.has(name)) lanes.set(name, new Map());
      const lane = lanes.get(name);
      for (const [start, one] of lane) if (one.end === null) lane.delete(start);
      for (const [start, until, busy, count, what] of stretches) lane.set(start, { start, end: until, busy, count, what: state.doing[what] });
      for (const [start, one] of lane) if (isGone(one.end ?? now)) lane.delete(start);
    }
    draw();
    const rows = [...lanes].map(([name, lane]) => summary(name, lane, Math.min(length, WIDEST)));
    table.update(rows);
    return rows;
  }

  // Nobody sees what ended then.
  const isGone = (moment) => moment < now - LANE_SECONDS && (view.end === null || moment < view.end - LANE_SECONDS || moment > view.end);

  function summary(name, lane, length) {
    let busy = 0, runs = 0;
    const users = new Set();
    for (const one of lane.values()) {
      const inside = Math.min(one.end ?? now, now) - Math.max(one.start, now - length);
      if (inside <= 0) continue;
      busy += Math.min(inside, one.busy);
      runs += one.count;
      users.add(one.what[0]);
    }
    return [name, percent(length > 0 ? busy / length : 0), runs, [...users].join(", ")];
  }

  function draw() {
    const height = TOP + Math.max(1, lanes.size) * LANE + AXIS, until = end(), from = until - view.length;
    drawing.style.height = `${height}px`;
    width = drawing.getBoundingClientRect().width || 800;
    drawing.replaceChildren();
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    follows.setAttribute("aria-pressed", String(view.end === null));
    axisBelow(drawing, [from - now, until - now], (at) => x(at + now), { left: left(), right: width - 8, top: 0, bottom: height - AXIS, unit: "s" });
    const users = new Map();
    [...lanes].forEach(([name, lane], number) => {
      const y = TOP + number * LANE;
      drawing.append(svg("line", { class: "axis", x1: 0, x2: width, y1: y + LANE - 2, y2: y + LANE - 2 }),
        svg("text", { class: "label", x: 2, y: y + 20 }, name.length > letters() ? "…" + name.slice(1 - letters()) : name));
      for (const one of together(lane, from, until)) {
        const [user, doing] = one.what;
        users.set(user, hueOfName(user));
        const element = svg("rect", { class: doing.startsWith("feeding ") ? "span feeding" : "span", x: one.x1, y: y + 4, width: Math.max(one.x2 - one.x1, 0.7), height: LANE - 10 });
        element.style.setProperty("--hue", hueOfName(user));
        element.addEventListener("pointerenter", () => panel.replaceChildren(html("strong", {}, user), definitions([
          ["does", doing], ["begins", `${seconds(Math.max(0, now - one.start))} ago`],
          [one.count > 1 ? `${one.count} times, at work` : "takes", one.end === null ? `${seconds(one.busy)} so far` : seconds(one.busy)],
        ])));
        drawing.append(element);
        const room = Math.floor((one.x2 - one.x1 - 6) / 7);
        if (room >= 4) drawing.append(svg("text", { class: "inside", x: one.x1 + 3, y: y + 20 }, user.slice(0, room)));
      }
    });
    const names = [...users.keys()].sort().join("\n");
    if (entries.dataset.names !== names) {
      entries.dataset.names = names;
      entries.replaceChildren(legend(...[...users].sort().map(([user, hue]) => [{ class: "span", hue }, user])));
    }
  }

  // The stretches that are seen, those that share a pixel as one.
  function together(lane, from, until) {
    const found = [];
    for (const one of [...lane.values()].sort((a, b) => a.start - b.start)) {
      const stop = one.end ?? now;
      if (stop < from || one.start > until) continue;
      const x1 = Math.max(x(one.start), left()), x2 = Math.min(x(stop), width - 8), last = found.at(-1);
      if (last && x1 - last.x2 < 0.5 && x2 - last.x1 < 1.5 && last.what[0] === one.what[0]) {
        last.x2 = Math.max(x2, last.x2);
        last.busy += one.busy;
        last.count += one.count;
        last.end = one.end;
      } else found.push({ ...one, x1, x2 });
    }
    return found;
  }

  function zoom(factor, share = 1) {
    const at = end() - (1 - share) * view.length;
    view.length = Math.min(Math.max(view.length / factor, NARROWEST), WIDEST);
    if (view.end !== null || share < 1) view.end = Math.min(at + (1 - share) * view.length, now);
    draw();
  }
  function move(part) {
    const first = Math.min(now, ...[...lanes.values()].flatMap((lane) => [...lane.keys()]));
    view.end = Math.min(Math.max(end() + part * view.length, first + view.length), now);
    draw();
  }

  drawing.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && document.activeElement !== drawing) return; // who scrolls the page past it means the page
    event.preventDefault();
    zoom(event.deltaY < 0 ? 1.25 : 1 / 1.25, (event.clientX - drawing.getBoundingClientRect().left - left()) / (width - left() - 8));
  }, { passive: false });
  drawing.addEventListener("keydown", (event) => {
    const acts = { "+": () => zoom(2), "=": () => zoom(2), "-": () => zoom(1 / 2), ArrowLeft: () => move(-1 / 4), ArrowRight: () => move(1 / 4),
      0: () => follows.click() };
    if (!acts[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    acts[event.key]();
  });
  let held = null;
  drawing.addEventListener("pointerdown", (event) => { held = event.clientX; });
  drawing.addEventListener("pointermove", (event) => {
    if (held === null || event.buttons === 0) return;
    move((held - event.clientX) / (width - left()));
    held = event.clientX;
  });
  new ResizeObserver(draw).observe(drawing);
  return { take, forget: () => lanes.clear() };
}

function button(label, title, act) {
  const element = html("button", { type: "button", title, "aria-label": title }, label);
  element.addEventListener("click", act);
  return element;
}
