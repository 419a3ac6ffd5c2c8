// Workers and streams as lanes. Zooming and panning change the time that is shown; what is too narrow to see is left out.
SECTIONS.timeline = (place, data) => {
  const LANE = 46, TOP = 8, AXIS = 22;
  const lanes = data.lanes, LEFT = Math.min(118, 14 + 6.5 * Math.max(0, ...lanes.map((lane) => lane.name.length))), critical = new Set(data.critical ?? []);
  const end = Math.max(1, ...lanes.flatMap((lane) => [...lane.spans, ...lane.waits].map((span) => span[1] + span[2])));
  if (data.causes) place.append(causes(data));
  const bar = html("div", { class: "bar" });
  const height = TOP + lanes.length * LANE + AXIS;
  const drawing = svg("svg", { class: "drawing lanes", role: "group", tabindex: "0", "aria-label": "Timeline: arrow keys move, plus and minus zoom" });
  drawing.style.height = `${height}px`;
  const panel = html("div", { class: "panel", "aria-live": "polite" }, "Point at a span.");
  place.append(bar, drawing);
  const view = { from: 0, to: end };
  let width = 800;

  const x = (time) => LEFT + (time - view.from) / (view.to - view.from) * (width - LEFT - 6);
  const time = (place) => view.from + (place - LEFT) / (width - LEFT - 6) * (view.to - view.from);
  const isShown = (start, length) => start + length >= view.from && start <= view.to;

  function rectangle(start, length, y, size, kind, text) {
    const left = Math.max(x(start), LEFT), right = Math.min(x(start + length), width);
    if (right - left < 0.3) return null;
    const element = svg("rect", { class: kind, x: left, y, width: Math.max(right - left, 0.5), height: size });
    element.addEventListener("pointerenter", () => panel.replaceChildren(html("strong", {}, text[0]), definitions(text.slice(1))));
    drawing.append(element);
    return element;
  }

  function draw() {
    width = drawing.getBoundingClientRect().width || 800;
    drawing.replaceChildren();
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    lanes.forEach((lane, number) => {
      const y = TOP + number * LANE;
      drawing.append(svg("line", { class: "axis", x1: 0, x2: width, y1: y + LANE - 4, y2: y + LANE - 4 }),
        svg("text", { class: "label", x: 2, y: y + 22 }, lane.name.length > 17 ? "…" + lane.name.slice(-16) : lane.name));
      const chainAt = new Map();
      for (const [chain, start, length, queued] of lane.chains) {
        if (!isShown(start, length)) continue;
        chainAt.set(chain, [start, start + length]);
        rectangle(start, length, y + 2, LANE - 10, critical.has(chain) ? "chain critical" : "chain",
          [`chain ${chain}`, ["begins", `${start} µs`], ["takes", `${length} µs`], ["waited in the queue", `${queued} µs`],
            ["critical path", critical.has(chain) ? "yes" : "no"]]);
      }
      for (const [operator, start, length] of lane.spans) {
        if (!isShown(start, length)) continue;
        const name = operator === null ? "copy" : data.operators[operator];
        const element = rectangle(start, length, y + 8, LANE - 22, "span", [name, ["begins", `${start} µs`], ["takes", `${length} µs`]]);
        if (element && operator !== null) element.style.setProperty("--hue", hueOf(data.chain_of[operator]));
        if (x(start + length) - x(start) > 60) {
          const label = svg("text", { class: "inside", x: Math.max(x(start), LEFT) + 3, y: y + 22 }, name.slice(0, Math.floor((x(start + length) - x(start)) / 7)));
          drawing.append(label);
        }
      }
      for (const [what, start, length] of lane.waits) {
        if (isShown(start, length)) rectangle(start, length, y + LANE - 13, 6, "wait", [`waits for ${what}`, ["begins", `${start} µs`], ["takes", `${length} µs`]]);
      }
    });
    drawArrows();
    drawAxis();
  }

  function drawArrows() {
    const seen = data.arrows.filter(([, start, , until]) => until >= view.from && start <= view.to);
    if (seen.length > 400) return; // more than that is a gray field: zoom in
    for (const [from, start, to, until] of seen) {
      const y1 = TOP + from * LANE + LANE / 2, y2 = TOP + to * LANE + LANE / 2, x1 = x(start), x2 = x(until);
      const side = y2 > y1 ? -1 : 1;
      drawing.append(svg("path", { class: "arrow", d: `M${x1} ${y1}C${x1 + 14} ${y1} ${x2 - 14} ${y2} ${x2} ${y2}m-4 ${side * 4}l4 ${-side * 4}l-5 0` }));
    }
  }

  function drawAxis() {
    axisBelow(drawing, [view.from / 1e6, view.to / 1e6], (at) => x(at * 1e6), { left: LEFT, right: width, top: 0, bottom: height - AXIS, unit: "s" });
  }

  function zoom(factor, at) {
    const middle = at ?? (view.from + view.to) / 2;
    const least = Math.min(end, 2);
    const size = Math.min(Math.max((view.to - view.from) / factor, least), end);
    const share = (middle - view.from) / (view.to - view.from);
    moveTo(middle - share * size, size);
  }
  function moveTo(from, size = view.to - view.from) {
    view.from = Math.min(Math.max(from, 0), end - size);
    view.to = view.from + size;
    draw();
  }

  drawing.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(event.deltaY < 0 ? 1.2 : 1 / 1.2, time(event.clientX - drawing.getBoundingClientRect().left));
  }, { passive: false });
  let held = null;
  drawing.addEventListener("pointerdown", (event) => { held = event.clientX; });
  drawing.addEventListener("pointermove", (event) => {
    if (held === null) return;
    moveTo(view.from - (event.clientX - held) / (width - LEFT) * (view.to - view.from));
    held = event.clientX;
  });
  for (const kind of ["pointerup", "pointerleave", "pointercancel"]) drawing.addEventListener(kind, () => { held = null; });
  drawing.addEventListener("keydown", (event) => {
    const step = (view.to - view.from) / 8;
    const acts = { "+": () => zoom(1.4), "=": () => zoom(1.4), "-": () => zoom(1 / 1.4), "0": () => moveTo(0, end),
      ArrowLeft: () => moveTo(view.from - step), ArrowRight: () => moveTo(view.from + step) };
    if (!acts[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    acts[event.key]();
  });
  for (const [label, title, act] of [["+", "Zoom in", () => zoom(1.6)], ["−", "Zoom out", () => zoom(1 / 1.6)], ["Fit", "Show all", () => moveTo(0, end)]]) {
    const button = html("button", { type: "button", title, "aria-label": title }, label);
    button.addEventListener("click", act);
    bar.append(button);
  }
  new ResizeObserver(draw).observe(drawing);
  draw();
  place.append(legend([{ class: "span", hue: hueOf(0) }, "an operator, in the color of its chain"],
    ...(critical.size ? [[{ class: "chain critical" }, "critical path"]] : []), ...(lanes.some((lane) => lane.waits.length) ? [[{ class: "wait" }, "waits for an event"]] : []),
    ...(data.arrows.length ? [[{ shape: "line", class: "arrow" }, "made ready by another worker, or an event"]] : [])), panel);
  place.append(tableOf("This run as a table", ["lane", "operator", "begins (µs)", "takes (µs)"], () =>
    lanes.flatMap((lane) => [
      ...lane.spans.map(([operator, start, length]) => [lane.name, operator === null ? "copy" : data.operators[operator], start, length]),
      ...lane.waits.map(([what, start, length]) => [lane.name, `waits for ${what}`, start, length]),
    ])));

  // The workers' time as one bar, by what it went to.
  function causes({ causes: parts, workers, seconds: length, slowdown }) {
    const whole = workers * length;
    const list = html("dl", { class: "causes" });
    for (const [name, part] of Object.entries(parts)) {
      const share = `${(part / whole * 100).toFixed(1)}%`;
      const bar = html("span", { class: `share ${name.split(" ")[0]}` });
      bar.style.width = share;
      list.append(html("dt", {}, name), html("dd", {}, bar, ` ${share}, ${seconds(part)}`));
    }
    if (slowdown !== null && slowdown !== undefined) {
      list.append(html("dt", {}, "memory"), html("dd", {}, `operators take ${slowdown.toFixed(2)} times as long as alone`));
    }
    return list;
  }
};
