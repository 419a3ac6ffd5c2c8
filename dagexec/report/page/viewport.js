// A drawing that zooms and pans: by wheel, by dragging, by pinching, and by the keys + - 0 and the arrows.
class Viewport {
  constructor(drawing, buttons) {
    this.drawing = drawing;
    this.pointers = new Map();
    drawing.setAttribute("tabindex", "0");
    drawing.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? 1.15 : 1 / 1.15, this.place(event));
    }, { passive: false });
    drawing.addEventListener("pointerdown", (event) => this.pointers.set(event.pointerId, event));
    drawing.addEventListener("pointermove", (event) => this.move(event));
    for (const kind of ["pointerup", "pointercancel", "pointerleave"]) {
      drawing.addEventListener(kind, (event) => this.pointers.delete(event.pointerId));
    }
    drawing.addEventListener("keydown", (event) => this.key(event));
    for (const [label, title, act] of [
      ["+", "Zoom in", () => this.zoom(1.4)], ["−", "Zoom out", () => this.zoom(1 / 1.4)], ["Fit", "Show all", () => this.fit()],
    ]) {
      const button = html("button", { type: "button", title, "aria-label": title }, label);
      button.addEventListener("click", act);
      buttons.append(button);
    }
  }

  // Take `bounds` for all there is, and show it.
  show(bounds) {
    this.bounds = bounds;
    this.fit();
  }

  fit() {
    const { x, y, width, height } = this.bounds;
    const shape = this.drawing.getBoundingClientRect();
    const scale = Math.min(shape.width / width, shape.height / height, 1.2) || 1;
    this.view = { x: x + (width - shape.width / scale) / 2, y: y + (height - shape.height / scale) / 2, width: shape.width / scale, height: shape.height / scale };
    this.apply();
  }

  // With `x` and `y` in the middle, large enough to read.
  center(x, y) {
    const shape = this.drawing.getBoundingClientRect();
    this.view.width = Math.min(this.view.width, shape.width / 0.8);
    this.view.height = this.view.width * shape.height / shape.width;
    this.view.x = x - this.view.width / 2;
    this.view.y = y - this.view.height / 2;
    this.apply();
  }

  place(event) {
    const shape = this.drawing.getBoundingClientRect();
    return { x: (event.clientX - shape.left) / shape.width, y: (event.clientY - shape.top) / shape.height };
  }

  zoom(factor, at = { x: 0.5, y: 0.5 }) {
    const view = this.view;
    const width = Math.min(Math.max(view.width / factor, 60), Math.max(this.bounds.width, this.bounds.height) * 4 + 400);
    const height = view.height * width / view.width;
    view.x += (view.width - width) * at.x;
    view.y += (view.height - height) * at.y;
    view.width = width;
    view.height = height;
    this.apply();
  }

  move(event) {
    const before = this.pointers.get(event.pointerId);
    if (!before) return;
    const shape = this.drawing.getBoundingClientRect();
    if (this.pointers.size === 2) {
      const [other] = [...this.pointers.values()].filter((one) => one.pointerId !== event.pointerId);
      const span = (one) => Math.hypot(one.clientX - other.clientX, one.clientY - other.clientY);
      if (span(before) > 0) this.zoom(span(event) / span(before), this.place(other));
    } else {
      this.view.x -= (event.clientX - before.clientX) * this.view.width / shape.width;
      this.view.y -= (event.clientY - before.clientY) * this.view.height / shape.height;
      this.apply();
    }
    this.pointers.set(event.pointerId, event);
  }

  key(event) {
    const step = this.view.width / 10;
    const acts = {
      "+": () => this.zoom(1.25), "=": () => this.zoom(1.25), "-": () => this.zoom(1 / 1.25), "0": () => this.fit(),
      ArrowLeft: () => { this.view.x -= step; }, ArrowRight: () => { this.view.x += step; },
      ArrowUp: () => { this.view.y -= step; }, ArrowDown: () => { this.view.y += step; },
    };
    if (!acts[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    acts[event.key]();
    this.apply();
  }

  apply() {
    const { x, y, width, height } = this.view;
    this.drawing.setAttribute("viewBox", `${x} ${y} ${width} ${height}`);
    const scale = this.drawing.getBoundingClientRect().width / width;
    this.drawing.classList.toggle("far", scale < 0.6); // where names are too small to read, only colors are left
    this.drawing.classList.toggle("farther", scale < 0.3);
  }
}
