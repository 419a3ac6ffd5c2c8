// The DAG: nodes of operators and of modules, a panel for the one under the cursor, a search, and a table. Where compile
// rewrote the net, it is drawn as it runs, and by a button as it was given.
SECTIONS.graph = (place, data) => {
  if (!data.given) return drawNet(place, data);
  const shown = html("div"), buttons = [["As it runs", data], ["As it is given", data.given]].map(([label, net]) => {
    const button = html("button", { type: "button" }, `${label}: ${net.operators.length} operators, ${net.chains} chains`);
    button.addEventListener("click", () => show(net, button));
    return [net, button];
  });
  place.append(html("div", { class: "bar", role: "group", "aria-label": "Which net" }, ...buttons.map(([, button]) => button)), shown);
  function show(net, pressed) {
    for (const [, button] of buttons) button.setAttribute("aria-pressed", String(button === pressed));
    shown.replaceChildren();
    drawNet(shown, net);
  }
  show(...buttons[0]);
};

function drawNet(place, data) {
  const WIDTH = 150, HEIGHT = 34, ACROSS = 164, DOWN = 62;
  const { operators, drawings } = data;
  const placeOf = new Map();
  for (const [path, drawing] of Object.entries(drawings)) {
    drawing.nodes.forEach((node, number) => {
      if (node.operator !== undefined) placeOf.set(node.operator, [path, number]);
    });
  }
  const search = html("input", { type: "search", placeholder: "Search operators", "aria-label": "Search operators by name, type or blob" });
  const found = html("span", { role: "status", class: "path" });
  const path = html("div", { class: "path" });
  const isTimed = operators.some((one) => one.seconds > 0);
  const colors = html("select", { "aria-label": "What colors mean" }, ...(isTimed ? [html("option", { value: "time" }, "color: time")] : []),
    html("option", { value: "chain" }, "color: chain"));
  const bar = html("div", { class: "bar" }, search, found, ...(isTimed ? [colors] : []));
  const drawing = svg("svg", { class: "drawing", role: "group", "aria-label": "The DAG of the net" });
  const panel = html("div", { class: "panel", "aria-live": "polite" }, "Point at an operator, or move to one with the tab key.");
  const meaning = html("div");
  place.append(bar, path, html("div", { class: "split" }, drawing, panel), meaning);
  const viewport = new Viewport(drawing, bar);
  let current, elements = [], columns, slowest;

  // Layers go on in a column beside where the first are as high as the view.
  const at = ([x, y]) => [x * ACROSS + Math.floor(y / columns.layers) * columns.width, y % columns.layers * DOWN];
  // As many layers a column as let the net be drawn largest.
  function columnsOf(nodes) {
    const shape = drawing.getBoundingClientRect(), xs = nodes.map((node) => node.x), layers = Math.max(0, ...nodes.map((node) => node.y)) + 1;
    const left = Math.min(0, ...xs) * ACROSS - WIDTH / 2 - 10, width = Math.max(0, ...xs) * ACROSS + WIDTH / 2 + 40 - left;
    const of = (count) => ({ left, width, count, layers: Math.ceil(layers / count), height: Math.ceil(layers / count) * DOWN });
    const scale = (one) => Math.min(shape.width / (one.width * one.count), shape.height / one.height);
    return Array.from({ length: Math.min(layers, 12) }, (_, more) => of(more + 1)).reduce((best, one) => scale(one) > scale(best) * 1.1 ? one : best);
  }
  const short = (text, most) => text.length > most ? "…" + text.slice(1 - most) : text;

  function line(from, bends, to) {
    const points = [from, ...bends, to].map(at);
    const [x, y] = points[0];
    let text = `M${x} ${y + HEIGHT / 2}`;
    for (let i = 1; i < points.length; i++) {
      const [x0, y0] = points[i - 1], [x1, y1] = points[i];
      if (y1 < y0) { // on to the next column, between both
        const middle = Math.floor((Math.max(x0, x1) - columns.left) / columns.width) * columns.width + columns.left - 15;
        const low = i === 1 ? y0 + HEIGHT / 2 : y0, up = i === points.length - 1 ? y1 - HEIGHT / 2 : y1;
        text += `C${x0} ${low + 22} ${middle} ${low + 22} ${middle} ${low}L${middle} ${up}C${middle} ${up - 22} ${x1} ${up - 22} ${x1} ${up}`;
        continue;
      }
      const top = i === 1 ? y0 + HEIGHT / 2 : y0, bottom = i === points.length - 1 ? y1 - HEIGHT / 2 : y1;
      const middle = (top + bottom) / 2;
      text += `C${x0} ${middle} ${x1} ${middle} ${x1} ${bottom}`;
    }
    return text;
  }

  // An edge that should be there, between the operators or the modules that they are in.
  function drawMissing(nodes, ...ends) {
    const [from, to] = ends.map((operator) => nodes.find((node) => node.operator === operator || node.operators?.includes(operator)));
    if (!from || !to || from === to) return;
    const [[x0, y0], [x1, y1]] = [from, to].map((node) => at([node.x, node.y]));
    drawing.append(svg("path", { class: "edge missing", d: `M${x0} ${y0}Q${(x0 + x1) / 2 + 40} ${(y0 + y1) / 2} ${x1} ${y1}` },
      svg("title", {}, "missing")));
  }

  function describe(node) {
    panel.replaceChildren();
    if (node.group !== undefined) {
      const inside = node.operators.map((index) => operators[index]);
      const open = html("button", { type: "button" }, "Open");
      open.addEventListener("click", () => draw(node.group));
      const total = (key) => inside.reduce((sum, one) => sum + (one[key] ?? 0), 0);
      const rows = [["operators", String(inside.length)], ["FLOPs", count(total("flops"))]];
      if (inside.some((one) => one.seconds !== undefined)) rows.push(["time", seconds(total("seconds"))]);
      panel.append(html("strong", {}, node.label), definitions(rows), open);
      return;
    }
    const one = operators[node.operator];
    const rows = [["number", String(node.operator)], ["chain", String(one.chain)], ["engine", one.engine]];
    if (one.seconds !== undefined) rows.push(["time", seconds(one.seconds)]);
    if (one.flops !== undefined) {
      rows.push(["FLOPs", count(one.flops)], ["bytes", count(one.bytes)]);
      if (one.seconds > 0) rows.push(["rate", `${count(one.flops / one.seconds)}FLOP/s, ${count(one.bytes / one.seconds)}B/s`]);
    }
    rows.push(["inputs", one.inputs.join(", ") || "none"]);
    rows.push(["outputs", one.outputs.map((name, i) => one.shapes[i] ? `${name}: ${one.shapes[i]}` : name).join(", ") || "none"]);
    panel.append(html("strong", {}, `${one.type} ${one.name}`), definitions(rows));
  }

  function show(number) {
    for (const element of elements) element.classList.remove("shown");
    elements[number].classList.add("shown");
    describe(drawings[current].nodes[number]);
  }

  function draw(where) {
    current = where;
    const { nodes, edges } = drawings[where];
    columns = columnsOf(nodes);
    const times = nodes.map((node) => (node.operators ?? [node.operator]).reduce((sum, index) => sum + (operators[index].seconds ?? 0), 0));
    slowest = Math.max(...times);
    drawing.replaceChildren();
    for (const [from, to, bends] of edges) {
      drawing.append(svg("path", { class: "edge", d: line([nodes[from].x, nodes[from].y], bends, [nodes[to].x, nodes[to].y]) }));
    }
    for (const [from, to] of data.missing) drawMissing(nodes, from, to);
    elements = nodes.map((node, number) => {
      const [x, y] = at([node.x, node.y]);
      const isGroup = node.group !== undefined;
      const one = isGroup ? null : operators[node.operator];
      const label = isGroup ? node.label : one.type, below = isGroup ? `${node.operators.length} operators` : one.name;
      const element = svg("g", { class: isGroup ? "node group" : "node", tabindex: "0", role: "button", "aria-label": `${label} ${below}`,
        transform: `translate(${x - WIDTH / 2} ${y - HEIGHT / 2})` },
        svg("rect", { width: WIDTH, height: HEIGHT, rx: 5 }),
        svg("text", { x: WIDTH / 2, y: 14 }, short(label, 20)), svg("text", { class: "name", x: WIDTH / 2, y: 27 }, short(below, 28)));
      element.style.setProperty("--heat", heat(times[number]));
      if (one) element.style.setProperty("--hue", hueOf(one.chain));
      if (one && one.critical) element.classList.add("critical");
      element.addEventListener("pointerenter", () => show(number));
      element.addEventListener("focus", () => show(number));
      if (isGroup) {
        element.addEventListener("dblclick", () => draw(node.group));
        element.addEventListener("keydown", (event) => { if (event.key === "Enter") draw(node.group); });
      }
      return element;
    });
    drawing.append(...elements);
    viewport.show({ x: columns.left, y: -DOWN / 2, width: columns.width * columns.count, height: columns.height });
    showPath(where);
    paint();
  }

  // A share of the longest time in the drawing, 0 to 1.
  function heat(time) {
    return slowest ? (time / slowest).toFixed(3) : 0;
  }

  function paint() {
    const byTime = colors.value === "time";
    drawing.classList.toggle("by-time", byTime);
    const longest = new Map();
    for (const one of operators) longest.set(one.chain, (longest.get(one.chain) ?? 0) + (isTimed ? one.seconds : 1));
    const chains = [...longest].sort((a, b) => b[1] - a[1]), first = chains.slice(0, 4);
    const times = ticks(0, slowest, 4), texts = tickLabels(times, "s");
    const critical = operators.some((one) => one.critical) ? [[{ class: "frame" }, "on the critical path"]] : [];
    meaning.replaceChildren(byTime
      ? legend(...times.map((time, number) => [{ class: "heat", heat: heat(time) }, texts[number]]), ...critical)
      : legend(...first.map(([chain, size]) => [{ class: "buffer", hue: hueOf(chain) }, `chain ${chain}: ${isTimed ? seconds(size) : `${size} operators`}`]),
        ...(chains.length > 4 ? [[{ class: "buffer none" }, `and ${chains.length - 4} more, a color each`]] : []), ...critical));
  }
  colors.addEventListener("change", paint);

  // The way from the whole net to this module, each part of which leads back.
  function showPath(where) {
    path.replaceChildren();
    if (Object.keys(drawings).length === 1) return;
    const steps = [["whole net", ""]];
    for (const known of Object.keys(drawings).sort((a, b) => a.length - b.length)) {
      if (known && (where === known || where.startsWith(known + "/"))) steps.push([known, known]);
    }
    steps.forEach(([label, target], step) => {
      const button = html("button", { type: "button" }, label);
      if (target === where) button.setAttribute("aria-current", "true");
      button.addEventListener("click", () => draw(target));
      path.append(...(step ? [" › ", button] : [button]));
    });
  }

  let matches = [], position = -1;
  function look() {
    const text = search.value.trim().toLowerCase();
    const has = (one) => [one.name, one.type, ...one.outputs].some((word) => word.toLowerCase().includes(text));
    matches = text ? operators.flatMap((one, index) => has(one) ? [index] : []) : [];
    position = -1;
    found.textContent = text ? `${matches.length} found` : "";
    for (const element of elements) element.classList.remove("found");
    if (matches.length) next();
  }
  function next() {
    position = (position + 1) % matches.length;
    const [where, number] = placeOf.get(matches[position]);
    if (where !== current) draw(where);
    for (const element of elements) element.classList.remove("found");
    elements[number].classList.add("found");
    const node = drawings[where].nodes[number];
    viewport.center(...at([node.x, node.y]));
    show(number);
    found.textContent = `${position + 1} of ${matches.length}`;
  }
  search.addEventListener("input", look);
  search.addEventListener("keydown", (event) => { if (event.key === "Enter" && matches.length) next(); });

  draw("");
  new ResizeObserver(() => columnsOf(drawings[current].nodes).count === columns.count ? viewport.fit() : draw(current)).observe(drawing);
  place.append(tableOf(`All ${operators.length} operators as a table`,
    ["number", "operator", "name", "chain", "engine", "outputs", "MFLOP", "µs"],
    () => operators.map((one, index) => [index, one.type, one.name, one.chain, one.engine,
      one.outputs.map((name, i) => one.shapes[i] ? `${name}: ${one.shapes[i]}` : name).join(", "),
      one.flops === undefined ? "" : Math.round(one.flops / 1e3) / 1e3,
      one.seconds === undefined ? "" : Math.round(one.seconds * 1e8) / 1e2])));
}
