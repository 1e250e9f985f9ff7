// The live picture of a session: losses inside their limits, every lane at a glance, one lane's slots.
//
// Names used throughout: `ctx` is the drawing context; `look` holds colours and font; `run` is the page's copy of the
// session; `box` is a rectangle {x, y, w, h} of the canvas; `X` and `Y` turn a batch and a loss into pixels. An
// incident has `x` (batch of the anomaly), `end` (batch at which training resumed), `back` (batch of the restored
// snapshot, or null), `level` (its loss, or null), `lost_from` (the last batch before those that were lost) and
// `recovered` (batch of the first loss as good as before, or null). A loss of Infinity was not finite, NaN was not
// measured.

const DASH = {limit: [], absolute: [7, 4], rise: [1.5, 4]};
const RAIL = 15; // pixels above the loss axis where losses stand that are not finite
const LEFT = 62; // pixels beside the picture, for numbers and names of lanes
const RIGHT = 112; // for the names of limits
const NARROW = {below: 560, left: 44, right: 76}; // a phone
const LINE = 13; // height of a line of text
const SLOT = 21; // height of a slot
const GAP = 20; // between panels, for a title
const TITLE = 5; // of a title above its panel
const SILENCE = [6000, 15000]; // milliseconds without news after which a page asks whether there is a kernel: in a run
  // or while a button waits, and at rest
const LATE = 8000; // milliseconds without a first answer after which a page says what can be done
const SETTLING = 3000; // milliseconds in which a panel that is new on the page is kept in sight
const CHARTS = 96; // height of a controller's curves
const METRIC = 84; // height of a second curve
const ACCURACY = "held-out accuracy, pp"; // its name among the metrics
const NEAR = 9; // pixels from a mark within which a click means it
const DRAG = 6; // pixels from which on a press is a stretch and no click
const FLASH = [[1.5, -8], [-4.5, 1.5], [-0.8, 1.5], [-2, 8], [4.5, -2], [0.6, -2]]; // corners, pixels from its middle
const MOST_INCIDENTS = 200;
const EMPTY = 1; // highest stage of a slot that holds nothing
const TAKEN_OUT = 8; // lowest stage of a seed that was taken out

const floats = view => new Float32Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));

// ---------------------------------------------------------------- the page's copy of a session

// Rows of numbers that grow at their end.
class Table {
  constructor(width) {
    this.width = width;
    this.rows = 0;
    this.wholes = 0; // how often everything was replaced
    this.data = new Float32Array(width * 256);
  }

  add(part, whole) {
    if (whole) {
      this.rows = 0;
      this.wholes++;
    }
    const need = this.rows * this.width + part.length;
    if (need > this.data.length) {
      const roomier = new Float32Array(2 * need);
      roomier.set(this.data.subarray(0, this.rows * this.width));
      this.data = roomier;
    }
    this.data.set(part, this.rows * this.width);
    this.rows += part.length / this.width;
  }

  at(row, column) { return this.data[row * this.width + column]; }

  // Last row whose first number is at most `x`.
  find(x) {
    let low = 0, high = this.rows - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.at(middle, 0) <= x) low = middle;
      else high = middle - 1;
    }
    return low;
  }
}

// A view's copy of a session.
class Run {
  constructor(model) {
    this.model = model;
    this.words = {...WORDS, ...model.words};
    this.changed = () => {}; // asks the view to draw
    this.head = null; // what never changes: lanes, slots, stages, names
    this.status = null;
    this.incidents = new Map();
    this.faults = []; // number, x, lane and kind of those that were provoked
    this.grown = false; // whether any slot has ever held a seed
    this.gone = false; // whether the kernel no longer listens
    this.recent = false; // whether only the newest batches are shown
    this.window = null; // first and last batch of a stretch that the reader has chosen
    this.told = null; // number of the incident whose story is shown
    this.chosen = null; // name of the metric that is shown, "" for none; null: not chosen by the reader
    this.number = 0; // of the newest packet
    this.html = {}; // text around the picture
    this.requests = []; // buttons that no packet has answered yet
    this.heard = performance.now(); // when the newest packet came, or the page asked for a sign of life
    this.until = [0, 0]; // end of the axis for the whole run and for the newest batches
    this.listeners = {
      "msg:custom": (message, buffers) => this.receive(message, buffers),
      "change:lane": () => this.changed(),
      comm_live_update: () => this.ask(),
    };
    for (const [event, listener] of Object.entries(this.listeners)) model.on(event, listener);
    this.seen = () => this.answer();
    globalThis.document?.addEventListener("visibilitychange", this.seen);
    this.began = performance.now();
    this.hello(100);
  }

  close() {
    for (const [event, listener] of Object.entries(this.listeners)) this.model.off(event, listener);
    globalThis.document?.removeEventListener("visibilitychange", this.seen);
    clearTimeout(this.again);
  }

  // A kernel that was shut down or started anew cannot be sent to.
  send(message) {
    const before = this.gone;
    try {
      this.model.send(message);
      this.gone = false;
    } catch {
      this.gone = true;
    }
    if (this.gone !== before) this.changed();
  }

  // Find out whether the kernel listens; the message itself means nothing to it.
  ask() {
    this.heard = performance.now();
    if (this.head) this.send({kind: "ping"});
  }

  // A page that reloads may send before the kernel listens, so it repeats hello until the first packet arrives.
  hello(wait) {
    if (this.head) return;
    this.send({kind: "hello"});
    this.again = setTimeout(() => this.hello(Math.min(1.5 * wait, 15_000)), wait);
  }

  // A hidden page does not answer.
  answer() {
    if (this.number && !globalThis.document?.hidden) this.send({kind: "answer", number: this.number});
  }

  receive(message, buffers) {
    if (message.kind !== "packet") return;
    this.heard = performance.now();
    if (message.head) this.begin(message.head);
    if (!this.head) {
      this.send({kind: "hello"});
      return;
    }
    this.loss.add(floats(buffers[0]), message.whole[0]);
    const first = message.whole[1] ? 0 : this.states.rows;
    this.states.add(floats(buffers[1]), message.whole[1]);
    this.grown ||= this.holdsSeed(first);
    this.curve.add(floats(buffers[2]), message.whole[2]);
    (message.metrics ?? []).forEach(({name, width, whole}, k) => {
      if (!this.metrics.has(name)) this.metrics.set(name, new Table(width));
      this.metrics.get(name).add(floats(buffers[3 + k]), whole);
    });
    this.ends = this.ends.concat(message.ends).slice(-2000);
    this.status = message.status;
    this.age = message.age ?? this.age; // seconds since a cell left the panel on its page
    this.requests = this.requests.filter(request => message.status.answered < request.answer);
    Object.assign(this.html, message.html);
    this.faults = this.faults.concat(message.faults ?? []).slice(-MOST_INCIDENTS);
    for (const incident of message.incidents) this.incidents.set(incident.number, incident);
    while (this.incidents.size > MOST_INCIDENTS) this.incidents.delete(this.incidents.keys().next().value);
    this.number = message.number;
    if (message.answer) this.answer();
    this.changed();
  }

  begin(head) {
    this.head = head;
    this.incidents.clear();
    this.metrics = new Map(); // x, and one number or one of every lane
    this.faults = [];
    this.grown = false;
    this.ends = []; // x and lane of episodes that ended
    this.until = [0, 0];
    this.loss = new Table(1 + head.lanes); // batch, loss of every lane
    this.states = new Table(1 + head.lanes * (6 + head.slots.length)); // batch, limits, accuracies, slots
    this.curve = new Table(1 + head.curves.length); // x, a controller's curves
  }

  pick(lane) {
    this.model.set("lane", lane);
    this.model.save_changes();
    this.changed();
  }

  get lane() { return this.head ? Math.min(this.model.get("lane"), this.head.lanes - 1) : 0; }
  get learns() { return this.head.curves.length > 0; } // a controller is at work
  get height() {
    const charts = this.head && this.learns ? CHARTS - 50 : 0, metric = this.head && this.metric ? METRIC + GAP : 0;
    return +this.model.get("height") + charts + metric;
  }
  get overlaid() { return Boolean(this.head.names); } // several runs, one a lane
  laneName(lane) { return this.head.names?.[lane] ?? `lane ${lane}`; }

  // Names of the metrics that can be shown, and the one that is.
  get metricNames() {
    const measured = this.states.rows > 0 && this.head.lanes > 0 && !this.learns && this.accuracyKnown();
    return [...this.metrics.keys(), ...(measured ? [ACCURACY] : [])];
  }
  get metric() { return this.chosen ?? (this.learns ? "" : this.metrics.keys().next().value ?? ""); }

  accuracyKnown() {
    const row = this.states.rows - 1, first = 1 + this.head.lanes * 5;
    return Array.from({length: this.head.lanes}, (_, lane) => this.states.at(row, first + lane)).some(Number.isFinite);
  }

  // The points of the metric that is shown: a table, and the column of a lane in it.
  points() {
    if (this.metric === ACCURACY) return [this.states, lane => 1 + this.head.lanes * 5 + lane];
    const table = this.metrics.get(this.metric);
    return table ? [table, lane => (table.width > 2 ? 1 + lane : 1)] : null;
  }
  get now() { return this.loss.rows ? this.loss.at(this.loss.rows - 1, 0) : 0; }

  lossOf(row, lane) { return this.loss.at(row, 1 + lane); }
  limit(row, lane, kind) { return this.states.at(row, 1 + lane * 5 + kind); } // effective, absolute, σ, multiple, rise
  slot(row, slot, lane) { return decode(this.states.at(row, 1 + this.head.lanes * 6 + slot * this.head.lanes + lane)); }
  incidentsOf(lane) { return [...this.incidents.values()].filter(i => i.lane === lane); }

  // Whether any slot of any lane holds a seed in the states from a row on.
  holdsSeed(first) {
    const {head, states} = this, begin = 1 + head.lanes * 6, end = begin + head.lanes * head.slots.length;
    for (let row = first; row < states.rows; row++) {
      for (let column = begin; column < end; column++) {
        if (decode(states.at(row, column)).stage > EMPTY) return true;
      }
    }
    return false;
  }

  // Batches shown; the end moves in leaps, so that most updates find the axis as it was, to the last one at the end.
  range() {
    if (this.window) return this.window;
    const view = +this.recent, done = this.status?.state === "done";
    const room = done ? 0 : this.recent ? 24 : Math.max(20, 0.08 * this.now);
    if (done || this.now > this.until[view]) this.until[view] = Math.ceil(this.now + room);
    return [this.recent ? Math.max(0, this.until[1] - 240 - room) : 0, Math.max(this.until[view], 40)];
  }

  // Show a stretch of batches, at least a few and none before the first; without one the whole run.
  zoom(from, until) {
    if (from === undefined) this.told = this.window = null;
    else {
      const span = Math.max(8, until - from), first = Math.max(0, Math.min(from, this.now - 4));
      this.window = [Math.round(first), Math.round(first + span)];
    }
    this.changed();
  }

  goTo(incident) {
    const first = Math.min(incident.back ?? incident.x, incident.x);
    const last = Math.max(incident.end, incident.recovered ?? incident.end), room = Math.max(12, 0.7 * (last - first));
    this.pick(incident.lane);
    this.told = incident.number;
    this.zoom(first - room, last + room);
  }

  // The first row of losses that is shown, and the one behind the last.
  shownRows() {
    const [from, until] = this.range();
    return [this.loss.find(from), this.loss.rows ? this.loss.find(until) + 1 : 0];
  }

  // Lowest and highest loss of all lanes between two rows, the same for all but the outermost hundredths, and whether
  // any loss was not finite.
  extremes(first, last) {
    const {loss, head} = this, every = Math.max(1, Math.floor(((last - first) * head.lanes) / 4000)), some = [];
    let low = Infinity, high = -Infinity, broken = false, number = 0;
    for (let row = first; row < last; row++) {
      for (let lane = 0; lane < head.lanes; lane++) {
        const value = this.lossOf(row, lane);
        if (value === Infinity) broken = true;
        else if (value > 0) {
          low = Math.min(low, value);
          high = Math.max(high, value);
          if (number++ % every === 0) some.push(value);
        }
      }
    }
    some.sort((a, b) => a - b);
    const at = share => some[Math.round(share * (some.length - 1))];
    return {low, high, usual: some.length ? [at(0.01), at(0.99)] : [low, high], broken};
  }
}

// A slot's one number: 32 × (blueprint + 1) + 2 × stage + alpha.
function decode(code) {
  const blueprint = Math.floor(code / 32), rest = code - 32 * blueprint, stage = Math.floor(rest / 2);
  return {blueprint: blueprint - 1, stage, alpha: rest - 2 * stage};
}

// ---------------------------------------------------------------- colours and strokes

const LIGHT = {
  ink: "#1c2126", muted: "#5f6871", grid: "#e4e7ea", other: "rgba(88,100,112,.32)", focus: "#0072b2",
  limit: "#c04f00", rise: "#8a1475", chance: "#725f37", good: "#0c5547", back: "#ffffff",
};
const DARK = {
  ink: "#eceef0", muted: "#a3abb3", grid: "#31363b", other: "rgba(178,188,198,.34)", focus: "#6ea2e6",
  limit: "#ef7440", rise: "#c985ae", chance: "#cdce81", good: "#5fe8bc", back: "#111111",
};

// Colours and font for the page that an element is on, by the brightness of its ground.
function lookOf(element) {
  const css = getComputedStyle(element);
  const jupyter = css.getPropertyValue("--jp-layout-color0").trim();
  const ground = jupyter || getComputedStyle(document.body).backgroundColor || "#fff";
  const ctx = document.createElement("canvas").getContext("2d");
  ctx.fillStyle = ground;
  ctx.fillRect(0, 0, 1, 1);
  const [r, g, b, opacity] = ctx.getImageData(0, 0, 1, 1).data;
  const dark = opacity > 100 && 0.3 * r + 0.6 * g + 0.1 * b < 128;
  const font = css.getPropertyValue("--jp-ui-font-family").trim() || "system-ui, sans-serif";
  return {...(dark ? DARK : LIGHT), dark, font};
}

const count = incidents => `${incidents} incident${incidents === 1 ? "" : "s"}`;
const faded = (hex, strength) => hex + Math.round(255 * strength).toString(16).padStart(2, "0");

function short(value) {
  if (Math.abs(value) >= 100) return value.toFixed(0);
  if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(1);
  return String(+value.toPrecision(Math.abs(value) >= 1 ? 3 : 2));
}

// The first of some texts that has room, or the last: a text is never cut.
function fitting(ctx, look, texts, room, bold = false) {
  ctx.font = `${bold ? 600 : 400} 11px ${look.font}`;
  return texts.find(text => ctx.measureText(text).width <= room) ?? texts[texts.length - 1];
}

// Round numbers between two others.
function ticks(from, to, most) {
  const raw = (to - from) / most, power = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max(1, [1, 2, 5, 10].map(k => k * power).find(size => size >= raw));
  const out = [];
  for (let value = Math.ceil(from / step) * step; value <= to; value += step) out.push(value);
  return out;
}

function stroke(ctx, colour, width, points, dash = []) {
  ctx.strokeStyle = colour;
  ctx.lineWidth = width;
  ctx.setLineDash(dash);
  ctx.beginPath();
  points.forEach(([x, y], k) => (k ? ctx.lineTo(x, y) : ctx.moveTo(x, y)));
  ctx.stroke();
  ctx.setLineDash([]);
}

function write(ctx, look, text, x, y, colour, {align = "left", base = "middle", bold = false} = {}) {
  ctx.font = `${bold ? 600 : 400} 11px ${look.font}`;
  ctx.fillStyle = colour;
  ctx.textAlign = align;
  ctx.textBaseline = base;
  ctx.fillText(text, x, y);
}

// Places in a box that are taken, so that no tag is written over a mark or another tag.
class Places {
  constructor(box) {
    this.box = box;
    this.taken = [];
  }

  take(x, y, w, h) { this.taken.push({x, y, w, h}); }

  free(x, y, w, h) {
    const {box} = this;
    if (x < box.x || x + w > box.x + box.w || y < box.y || y + h > box.y + box.h) return false;
    return this.taken.every(t => x + w <= t.x || t.x + t.w <= x || y + h <= t.y || t.y + t.h <= y);
  }
}

// Lines of text on a veil at the first of some places [x, y, align] that is free; without one nothing is written.
function tag(ctx, look, places, lines, wanted, colour) {
  const font = bold => `${bold ? 600 : 400} 11px ${look.font}`;
  const width = Math.max(...lines.map(([text, bold]) => (ctx.font = font(bold), ctx.measureText(text).width))) + 6;
  const height = lines.length * LINE + 2, left = ([x, , align]) => (align === "right" ? x - width : x);
  const place = wanted.find(spot => places.free(left(spot), spot[1], width, height));
  if (!place) return;
  places.take(left(place), place[1], width, height);
  ctx.fillStyle = faded(look.back, 0.86);
  ctx.fillRect(left(place), place[1], width, height);
  const [, y, align] = place, x = align === "right" ? left(place) + width - 3 : left(place) + 3;
  lines.forEach(([text, bold], k) => write(ctx, look, text, x, y + 8 + k * LINE, colour, {align, bold}));
}

function cross(ctx, x, y, radius) {
  ctx.beginPath();
  ctx.moveTo(x - radius, y - radius);
  ctx.lineTo(x + radius, y + radius);
  ctx.moveTo(x - radius, y + radius);
  ctx.lineTo(x + radius, y - radius);
  ctx.stroke();
}

// A cross on a wider one in the colour of the ground.
function clearCross(ctx, look, x, y, [wide, wideRadius], [thin, radius]) {
  ctx.strokeStyle = look.back;
  ctx.lineWidth = wide;
  cross(ctx, x, y, wideRadius);
  ctx.strokeStyle = look.limit;
  ctx.lineWidth = thin;
  cross(ctx, x, y, radius);
}

function diamond(ctx, x, y, radius) {
  ctx.beginPath();
  ctx.moveTo(x, y - radius);
  ctx.lineTo(x + radius, y);
  ctx.lineTo(x, y + radius);
  ctx.lineTo(x - radius, y);
  ctx.closePath();
  ctx.fill();
  ctx.stroke();
}

function hatch(ctx, x, y, w, h, colour) {
  ctx.save();
  ctx.beginPath();
  ctx.rect(x, y, w, h);
  ctx.clip();
  ctx.strokeStyle = colour;
  ctx.lineWidth = 1;
  ctx.beginPath();
  for (let k = -h; k < w; k += 6) {
    ctx.moveTo(x + k, y + h);
    ctx.lineTo(x + k + h, y);
  }
  ctx.stroke();
  ctx.restore();
}

// A picture that is kept while its key stays the same.
class Layer {
  constructor() {
    this.key = "";
    this.canvas = document.createElement("canvas");
    this.ctx = this.canvas.getContext("2d");
  }

  // Make ready to draw into a box; the row to go on from, 0 after a fresh start.
  begin(key, box, dpr) {
    if (key !== this.key) {
      this.key = key;
      this.fit(Math.round(box.w * dpr), Math.round(box.h * dpr));
      this.rows = 0;
      this.pens = new Map(); // where each curve has ended
    }
    this.at = [Math.round(box.x * dpr), Math.round(box.y * dpr)];
    this.ctx.setTransform(dpr, 0, 0, dpr, -this.at[0], -this.at[1]);
    return this.rows;
  }

  fit(width, height) {
    if (this.canvas.width !== width || this.canvas.height !== height) {
      this.canvas.width = width;
      this.canvas.height = height;
      this.image = null;
    } else {
      this.ctx.setTransform(1, 0, 0, 1, 0, 0);
      this.ctx.clearRect(0, 0, width, height);
    }
  }

  show(ctx) {
    ctx.save();
    ctx.setTransform(1, 0, 0, 1, 0, 0);
    ctx.drawImage(this.canvas, ...this.at);
    ctx.restore();
  }
}

// ---------------------------------------------------------------- the losses of one lane, inside their limits

// Lowest and highest loss of the axis: room for limit and chance loss, but not for a ruined network.
function lossRange(run, found, chance) {
  const limit = run.limit(run.states.rows - 1, run.lane, 0);
  const {low, high} = found.high > 0 ? found : {low: 0.1, high: 3};
  const cap = Math.max(limit > 0 ? limit * 1.9 : 0, chance > 0 ? chance * 1.6 : 0, low * 4);
  const even = (value, round) => 10 ** (round(Math.log10(value) * 8) / 8); // steps of a third: the axis seldom changes
  const top = even(Math.min(Math.max(high * 1.15, cap), Math.max(cap, 1) * 40), Math.ceil);
  return [even(Math.max(low * 0.8, top * 1e-6), Math.floor), top];
}

function losses(ctx, look, run, box, X, layer) {
  const {lane, head} = run, [from, until] = run.range(), [first, last] = run.shownRows();
  const chance = head.chance_loss ? head.chance_loss[lane] : NaN, found = run.extremes(first, last);
  const [low, high] = lossRange(run, found, chance), top = box.y + RAIL;
  const share = value => Math.log(Math.min(Math.max(value, low), high) / low) / Math.log(high / low);
  const Y = value => top + (box.h - RAIL) * (1 - share(value));
  lossGrid(ctx, look, box, Y, low, high);
  ctx.save();
  ctx.beginPath();
  ctx.rect(box.x, box.y, box.w, box.h);
  ctx.clip();
  if (chance > 0 && run.status.band) chanceBand(ctx, look, box, Y, chance, run.status.band);
  limits(ctx, look, run, X, Y, box.y);
  for (const incident of run.incidentsOf(lane)) lostStretch(ctx, look, incident, box, X);
  curves(ctx, look, run, layer, box, X, Y, first, [from, until, low, high]);
  if (found.broken) brokenLosses(ctx, look, run, X, box.y + 8, first);
  marks(ctx, look, run, box, X, Y, from, until);
  ctx.restore();
  if (run.overlaid) runNames(ctx, look, run, box, Y, last);
  labels(ctx, look, run, box, Y, chance);
}

function lossGrid(ctx, look, box, Y, low, high) {
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) {
    for (const digit of high / low < 100 ? [1, 2, 5] : [1]) {
      const value = digit * 10 ** power;
      if (value < low || value > high) continue;
      stroke(ctx, look.grid, 1, [[box.x, Y(value)], [box.x + box.w, Y(value)]]);
      write(ctx, look, short(value), box.x - 6, Y(value), look.muted, {align: "right"});
    }
  }
}

function chanceBand(ctx, look, box, Y, chance, band) {
  const top = Y(chance * (1 + band)), height = Y(chance * (1 - band)) - top;
  ctx.fillStyle = faded(look.chance, 0.14);
  ctx.fillRect(box.x, top, box.w, height);
  hatch(ctx, box.x, top, box.w, height, faded(look.chance, 0.35));
}

// The path of one limit of the selected lane, a step per row of states; with a `ceiling` closed to an area below that.
function limitPath(ctx, run, kind, X, Y, ceiling) {
  const {states, lane} = run, closed = ceiling !== null;
  let open = false, x = 0, y = 0;
  const end = () => {
    if (open) {
      ctx.lineTo(x, y);
      if (closed) {
        ctx.lineTo(x, ceiling);
        ctx.closePath();
      }
    }
    open = false;
  };
  ctx.beginPath();
  for (let row = 0; row < states.rows; row++) {
    const value = run.limit(row, lane, kind), here = X(states.at(row, 0)), now = Y(value);
    if (!Number.isFinite(value)) {
      end();
      continue;
    }
    if (!open) {
      ctx.moveTo(here, closed ? ceiling : now);
      if (closed) ctx.lineTo(here, now);
      y = now;
      open = true;
    } else if (Math.abs(now - y) > 0.4) {
      ctx.lineTo(here, y);
      ctx.lineTo(here, now);
      y = now;
    }
    x = X(row + 1 < states.rows ? states.at(row + 1, 0) : run.range()[1]);
  }
  end();
}

function limits(ctx, look, run, X, Y, ceiling) {
  limitPath(ctx, run, 0, X, Y, ceiling);
  ctx.fillStyle = faded(look.limit, look.dark ? 0.13 : 0.08);
  ctx.fill();
  for (const [kind, name, colour, width] of [
    [1, "absolute", look.limit, 1], [4, "rise", faded(look.rise, 0.75), 1.1], [0, "limit", look.limit, 1.6],
  ]) {
    limitPath(ctx, run, kind, X, Y, null);
    ctx.setLineDash(DASH[name]);
    ctx.strokeStyle = colour;
    ctx.lineWidth = width;
    ctx.stroke();
    ctx.setLineDash([]);
  }
}

// All lanes; only rows that are new are drawn, unless the axes, the selected lane or the past have changed.
function curves(ctx, look, run, layer, box, X, Y, first, axes) {
  const {loss, head, lane} = run, dpr = window.devicePixelRatio || 1;
  const undone = [...run.incidents.values()].filter(i => i.back !== null).length;
  const key = [axes, box.x, box.y, box.w, box.h, dpr, lane, loss.wholes, undone, look.dark].join();
  const from = Math.max(first, layer.begin(key, box, dpr));
  if (from < loss.rows) {
    for (let other = 0; other < head.lanes; other++) {
      if (other === lane) continue;
      const colour = run.overlaid ? runColour(look, other) : look.other;
      curve(layer, run, other, X, Y, {colour, width: run.overlaid ? 1.4 : 1, from, newest: run.overlaid ? 0.2 : 0.4});
    }
    const mine = run.overlaid ? runColour(look, lane) : look.focus;
    curve(layer, run, lane, X, Y, {colour: faded(mine, 0.42), width: 1, from, newest: 1});
    curve(layer, run, lane, X, Y, {colour: mine, width: 2.2, from, newest: run.overlaid ? 0.2 : 0.3});
    layer.rows = loss.rows;
  }
  layer.show(ctx);
}

// One curve, smoothed in log space; `newest` is the weight of the newest loss.
function curve(layer, run, lane, X, Y, {colour, width, from, newest}) {
  const {loss} = run, {ctx, pens} = layer, id = `${lane},${width}`;
  const back = run.incidentsOf(lane).filter(i => i.back !== null);
  const ends = new Set(back.map(i => loss.find(i.end) + 1));
  const ruined = x => width > 2 && back.some(i => x > i.x && x <= i.end); // there only the thin curve is drawn
  let {open, mean, x, y} = pens.get(id) ?? {open: false, mean: 0, x: 0, y: 0};
  ctx.strokeStyle = colour;
  ctx.lineWidth = width;
  ctx.lineJoin = width > 2 ? "bevel" : "miter";
  ctx.beginPath();
  if (open) ctx.moveTo(x, y);
  for (let row = from; row < loss.rows; row++) {
    const value = run.lossOf(row, lane);
    if (!(value >= 0 && value < Infinity) || ruined(loss.at(row, 0))) {
      open = false;
      continue;
    }
    if (ends.has(row)) open = false;
    const log = Math.log(Math.max(value, 1e-9));
    mean = open && Math.abs(log - mean) < 2 ? mean + newest * (log - mean) : log;
    x = X(loss.at(row, 0));
    y = Y(Math.exp(mean));
    if (open) ctx.lineTo(x, y);
    else ctx.moveTo(x, y);
    open = true;
  }
  ctx.stroke();
  pens.set(id, {open, mean, x, y});
}

// Names of the lines, at their right ends, kept apart and inside the picture.
function labels(ctx, look, run, box, Y, chance) {
  const value = kind => run.limit(run.states.rows - 1, run.lane, kind), all = [];
  const highest = [1, 2, 3].reduce((a, b) => ((value(b) || 0) > (value(a) || 0) ? b : a));
  const known = value(0) <= 1.02 * value(highest); // else it is that of a run that has just begun
  const winner = known ? `set by ${["", "absolute", "sigma", "multiplier"][highest]}` : "few losses yet";
  const add = (at, names, number, colour) => {
    const text = number === undefined ? names : names.map(name => `${name} ${short(number)}`.trim());
    all.push({y: Y(at), text: fitting(ctx, look, text, box.right - 9), colour});
  };
  if (value(0) > 0) {
    add(value(0), ["limit", ""], value(0), look.limit);
    if (box.right === RIGHT) add(value(0), [winner], undefined, look.limit);
  }
  if (value(1) > 0 && !(Math.abs(Math.log(value(1) / value(0))) <= 0.02)) {
    add(value(1), ["absolute limit", "absolute", ""], value(1), look.limit);
  }
  if (chance > 0) add(chance, ["chance", ""], chance, look.chance);
  if (value(4) > 0) add(value(4), ["rise limit", "rise", ""], value(4), look.rise);
  all.sort((a, b) => a.y - b.y);
  all.forEach((label, k) => { label.y = Math.max(label.y, k ? all[k - 1].y + LINE : box.y); });
  all.forEach((label, k) => { label.y = Math.min(label.y, box.y + box.h - (all.length - 1 - k) * LINE); });
  for (const {y, text, colour} of all) write(ctx, look, text, box.x + box.w + 7, y, colour);
}

const RUNS = ["focus", "limit", "good", "rise", "chance", "ink"]; // colours of runs laid over each other
const runColour = (look, lane) => look[RUNS[lane % RUNS.length]];

// Names of runs beside the ends of their curves, kept apart.
function runNames(ctx, look, run, box, Y, last) {
  const all = run.head.names.map((name, lane) => {
    let row = last - 1;
    while (row > 0 && !(run.lossOf(row, lane) > 0 && run.lossOf(row, lane) < Infinity)) row--;
    return {y: Y(run.lossOf(row, lane) || 1), name, lane};
  }).sort((a, b) => a.y - b.y);
  all.forEach((label, k) => { label.y = Math.max(label.y, k ? all[k - 1].y + LINE : box.y + 6); });
  all.forEach((label, k) => { label.y = Math.min(label.y, box.y + box.h - (all.length - 1 - k) * LINE); });
  for (const {y, name, lane} of all) {
    const cut = [name, ...Array.from({length: name.length}, (_, k) => `${name.slice(0, name.length - k - 1)}…`)];
    const text = fitting(ctx, look, cut, box.right - 9, lane === run.lane);
    write(ctx, look, text, box.x + box.w + 7, y, runColour(look, lane), {bold: lane === run.lane});
  }
}

function brokenLosses(ctx, look, run, X, y, first) {
  ctx.strokeStyle = look.limit;
  ctx.lineWidth = 1.4;
  let before = -99;
  for (let row = first; row < run.loss.rows; row++) {
    const x = X(run.loss.at(row, 0));
    if (run.lossOf(row, run.lane) !== Infinity || x - before <= 7) continue;
    cross(ctx, x, y, 2.6);
    before = x;
  }
}

// ---------------------------------------------------------------- rollbacks

function lostStretch(ctx, look, incident, box, X) {
  if (incident.back === null || incident.lost === 0) return;
  const x = X(incident.lost_from), width = X(incident.end) - x;
  ctx.fillStyle = faded(look.limit, 0.07);
  ctx.fillRect(x, box.y, width, box.h);
  hatch(ctx, x, box.y, width, box.h, faded(look.limit, 0.16));
}

// Faults and the newest incidents of the selected lane; then their names, the newest first, where there is room.
function marks(ctx, look, run, box, X, Y, from, until) {
  const places = new Places(box), tags = [];
  const incidents = run.incidentsOf(run.lane).filter(i => i.end > from && i.x <= until).slice(-8).reverse();
  const faults = run.faults.filter(([, x, lane]) => lane === run.lane && x > from && x <= until).slice(-8).reverse();
  for (const incident of incidents) tags.push(...rollback(ctx, look, run, incident, box, X, Y, places));
  for (const [, x, , kind] of faults) tags.push(...fault(ctx, look, kind, X(x), box, places));
  for (const write of tags) write();
}

// A flash at the foot of the batch in which a fault began.
function fault(ctx, look, kind, x, box, places) {
  const y = box.y + box.h - 10;
  stroke(ctx, faded(look.limit, 0.55), 1, [[x, y - 8], [x, box.y]], [2, 4]);
  ctx.fillStyle = look.limit;
  ctx.strokeStyle = look.back;
  ctx.lineWidth = 2.5;
  ctx.beginPath();
  for (const [right, down] of FLASH) ctx.lineTo(x + right, y + down);
  ctx.closePath();
  ctx.stroke();
  ctx.fill();
  places.take(x - 6, y - 9, 12, 18);
  return [() => tag(ctx, look, places, [[kind, true]], [[x + 7, y - 7, "left"], [x - 7, y - 7, "right"]], look.limit)];
}

// Draw an incident; what writes its names is returned.
function rollback(ctx, look, run, incident, box, X, Y, places) {
  const height = batch => {
    const value = run.lossOf(run.loss.find(batch), incident.lane);
    return value >= 0 && value < Infinity ? Y(value) : null;
  };
  const x = X(incident.x), y = height(incident.x) ?? box.y + 8, tags = [];
  if (incident.back !== null) {
    const good = incident.level === null ? height(incident.back) : Y(incident.level);
    const back = [X(incident.back), good ?? box.y + RAIL + 20];
    wayBack(ctx, look, [x, y], back, box.y + RAIL);
    places.take(back[0] - 6, back[1] - 15, 12, 22);
    tags.push(() => snapshotTag(ctx, look, run, incident, back, box, places));
  }
  clearCross(ctx, look, x, y, [6, 5.5], [2.8, 5]);
  places.take(x - 7, y - 7, 14, 14);
  tags.push(() => incidentTag(ctx, look, run, incident, x, y, box, X, places));
  const recovered = incident.recovered === null ? null : height(incident.recovered);
  if (recovered !== null) {
    check(ctx, look, X(incident.recovered), recovered);
    places.take(X(incident.recovered) - 7, recovered - 8, 16, 16);
  }
  return tags;
}

// A dashed arrow from the anomaly to a diamond at the restored snapshot.
function wayBack(ctx, look, [x, y], [backX, backY], top) {
  const peak = Math.max(top + 8, Math.min(y, backY) - 34);
  for (const [colour, width, dash] of [[faded(look.back, 0.8), 4.5, []], [look.good, 1.8, [4, 3]]]) {
    ctx.strokeStyle = colour;
    ctx.lineWidth = width;
    ctx.setLineDash(dash);
    ctx.beginPath();
    ctx.moveTo(x, y);
    ctx.bezierCurveTo(x, peak, backX, peak - 8, backX, backY - 9);
    ctx.stroke();
  }
  ctx.setLineDash([]);
  ctx.fillStyle = look.good;
  ctx.beginPath();
  ctx.moveTo(backX, backY - 6);
  ctx.lineTo(backX - 4.5, backY - 14);
  ctx.lineTo(backX + 4.5, backY - 14);
  ctx.closePath();
  ctx.fill();
  ctx.fillStyle = look.back;
  ctx.lineWidth = 1.8;
  diamond(ctx, backX, backY, 4.6);
}

function snapshotTag(ctx, look, run, incident, [x, y], box, places) {
  if (run.incidentsOf(incident.lane).findLast(i => i.back === incident.back) !== incident) return; // named once
  const edge = Math.max(x, box.x), text = `${x < box.x ? "◂" : "◇"} snapshot, ${run.head.axis[0]} ${incident.back}`;
  const wanted = [8, 26, 44, -24].flatMap(down => [[edge - 8, y + down, "right"], [edge + 8, y + down, "left"]]);
  tag(ctx, look, places, [[text]], wanted, look.good);
}

function incidentTag(ctx, look, run, incident, x, y, box, X, places) {
  const first = Math.min(x, incident.back === null ? x : X(incident.back)), last = Math.max(x, X(incident.end));
  const lines = [[`${incident.reason} → ${incident.action}`, true]];
  if (incident.known_cause) lines.push([`cause: ${incident.known_cause.replace("the injected fault", "provoked")}`]);
  if (incident.back !== null) lines.push([`${incident.lost} ${run.head.axis[incident.lost === 1 ? 0 : 1]} lost`]);
  const at = [3, 35, 67].map(down => box.y + down);
  const wanted = at.flatMap(top => [[last + 7, top, "left"], [first - 7, top, "right"]]);
  tag(ctx, look, places, lines, wanted, look.limit);
}

function check(ctx, look, x, y) {
  const points = [[x - 5, y], [x - 1, y + 5], [x + 7, y - 6]];
  stroke(ctx, look.back, 6, points);
  stroke(ctx, look.good, 2.6, points);
}

// Draw what may be neither left nor right of a box.
function inside(ctx, box, above, draw) {
  ctx.save();
  ctx.beginPath();
  ctx.rect(box.x, box.y - above, box.w, box.h + 2 * above);
  ctx.clip();
  draw();
  ctx.restore();
}

// ---------------------------------------------------------------- all lanes

// How strongly a pixel of the heat map is coloured: -1 where a loss was not finite, 0 where none was measured.
function warmth(run, lane, from, until, low, high) {
  let sum = 0, count = 0;
  for (let row = from; row < until; row++) {
    const value = run.lossOf(row, lane);
    if (value === Infinity) return -1;
    if (!(value >= 0)) continue;
    sum += Math.log(Math.max(value, low));
    count++;
  }
  if (!count) return 0;
  const share = (sum / count - Math.log(low)) / Math.log(high / low || 2);
  return 0.04 + 0.86 * Math.min(1, Math.max(0, share)) ** 1.6;
}

// One pixel for a lane and some rows, painted only when there is news.
function heat(look, run, layer, [first, last], columns, low, high) {
  const {loss, head} = run, key = [first, last, columns, loss.wholes, low, high, look.dark].join();
  if (layer.key === key) return layer.canvas;
  layer.key = key;
  layer.fit(columns, head.lanes);
  layer.image ??= layer.ctx.createImageData(columns, head.lanes);
  const {data} = layer.image, rowsPerPixel = (last - first) / columns;
  const channels = hex => [1, 3, 5].map(k => parseInt(hex.slice(k, k + 2), 16));
  const fine = channels(look.focus), broken = channels(look.limit);
  for (let lane = 0; lane < head.lanes; lane++) {
    for (let column = 0; column < columns; column++) {
      const from = first + Math.floor(column * rowsPerPixel);
      const until = Math.max(from + 1, first + Math.floor((column + 1) * rowsPerPixel));
      const strength = warmth(run, lane, from, until, low, high), at = 4 * (lane * columns + column);
      data.set(strength < 0 ? broken : fine, at);
      data[at + 3] = Math.round(255 * Math.abs(strength));
    }
  }
  layer.ctx.putImageData(layer.image, 0, 0);
  return layer.canvas;
}

function strip(ctx, look, run, box, X, layer) {
  const {loss, head} = run, [first, last] = run.shownRows(), found = run.extremes(first, last);
  const even = value => 10 ** (Math.round(Math.log10(value) * 8) / 8); // so that old pixels seldom change
  ctx.fillStyle = faded(look.focus, 0.04);
  ctx.fillRect(box.x, box.y, box.w, box.h);
  const [low, most] = found.usual.map(even), twice = (head.chance_loss?.[0] ?? most) * 2;
  const high = Math.max(Math.min(most, twice), low * 1.3);
  if (first < last) {
    const x = X(first ? loss.at(first - 1, 0) : 0), columns = Math.min(last - first, Math.floor(box.w / 4));
    const image = heat(look, run, layer, [first, last], columns, low, high);
    ctx.save();
    ctx.imageSmoothingEnabled = false;
    ctx.beginPath();
    ctx.rect(box.x, box.y, box.w, box.h);
    ctx.clip();
    ctx.drawImage(image, x, box.y, X(loss.at(last - 1, 0)) - x, box.h);
    ctx.restore();
  }
  laneNames(ctx, look, run, box);
  if (run.learns) episodes(ctx, look, run, box, X);
  inside(ctx, box, 6, () => {
    for (const incident of run.incidents.values()) stripIncident(ctx, look, run, incident, box, X);
  });
  for (const lane of run.status.stopped) {
    const y = box.y + ((lane + 0.5) * box.h) / head.lanes;
    write(ctx, look, "■ stopped", box.x + box.w + 7, y, look.limit, {bold: true});
  }
}

function laneNames(ctx, look, run, box) {
  const {head, lane: focus} = run, height = box.h / head.lanes;
  const every = height >= 11 ? 1 : 4 * Math.ceil(LINE / (4 * height)); // a name has room in so many lanes
  for (let lane = 0; lane < head.lanes; lane++) {
    const y = box.y + lane * height, here = lane === focus;
    if (height >= 4) ctx.clearRect(box.x, Math.round(y + height) - 1, box.w, 1);
    if (here) {
      ctx.strokeStyle = look.ink;
      ctx.lineWidth = 1.5;
      ctx.strokeRect(box.x - 1, y - 1, box.w + 2, height + 1);
    }
    if (!here && (lane % every !== 0 || Math.abs(lane - focus) * height < LINE - 2)) continue;
    const name = here ? `▸ ${lane}` : String(lane), colour = here ? look.ink : look.muted;
    write(ctx, look, name, box.x - 6, y + height / 2, colour, {align: "right", bold: here});
  }
}

function stripIncident(ctx, look, run, incident, box, X) {
  const height = box.h / run.head.lanes, y = box.y + incident.lane * height, x = X(incident.x);
  if (x < box.x) return;
  if (incident.back !== null) {
    const left = Math.max(box.x, X(incident.lost_from));
    hatch(ctx, left, y, X(incident.end) - left, height - 1, faded(look.limit, 0.8));
  }
  const radius = Math.max(2.5, Math.min(4, height / 2));
  clearCross(ctx, look, x, y + height / 2, [4, radius], [2, radius]);
}

// A mark behind the last step of every episode.
function episodes(ctx, look, run, box, X) {
  const height = box.h / run.head.lanes;
  ctx.fillStyle = look.ink;
  for (const [x, lane] of run.ends) {
    if (X(x) >= box.x && X(x) <= box.x + box.w) ctx.fillRect(X(x) - 0.8, box.y + lane * height, 1.6, height - 1);
  }
}

// ---------------------------------------------------------------- the curves of a controller

const TITLES = [["return of an episode", "return"], ["accuracy, pp", "accuracy"],
  ["entropy of the policy, share", "entropy of the policy", "entropy"]]; // columns 1 to 3 of the curves, long to short
const COLOURS = ["good", "chance", "limit", "ink", "focus"]; // of the operations, the columns behind them

function charts(ctx, look, run, box) {
  const all = TITLES.map((titles, number) => [titles, [[number + 1, "focus", ""]]]);
  const operations = run.head.curves.slice(TITLES.length).map((name, number) =>
    [TITLES.length + 1 + number, COLOURS[number % COLOURS.length], name.replaceAll("_", " ")]);
  all.push([["operations, share", "operations"], operations]);
  const gap = 46, width = (box.w - all.length * gap) / all.length;
  all.forEach(([titles, lines], number) => {
    chart(ctx, look, run, {x: gap + number * (width + gap), y: box.y, w: width, h: box.h}, titles, lines);
  });
}

// One small picture: curves over all steps, each with its newest number or its name at its end.
function chart(ctx, look, run, box, titles, lines) {
  const {curve} = run, columns = lines.map(([column]) => column);
  let low = Infinity, high = -Infinity;
  for (let row = 0; row < curve.rows; row++) {
    for (const column of columns) {
      const value = curve.at(row, column);
      if (Number.isNaN(value)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  const newest = column => {
    let row = curve.rows - 1;
    while (row >= 0 && Number.isNaN(curve.at(row, column))) row--;
    return row < 0 ? NaN : curve.at(row, column);
  };
  const only = lines.length === 1 ? newest(columns[0]) : NaN;
  const texts = titles.map(title => (Number.isNaN(only) ? title : `${title}: ${short(only)}`));
  const text = fitting(ctx, look, texts, box.w + 36, true);
  write(ctx, look, text, box.x, box.y - TITLE, look.ink, {base: "alphabetic", bold: true});
  if (!(high >= low)) return;
  if (lines.length > 1) low = 0;
  let at = box.x, line = box.y + 5;
  for (const [, colour, name] of lines) {
    const width = ctx.measureText(name).width;
    if (at + width > box.x + box.w) [at, line] = [box.x, line + 12];
    write(ctx, look, name, at, line, look[colour]);
    at += width + 10;
  }
  if (lines.length > 1) box = {...box, y: box.y + 28, h: box.h - 28}; // the names stand above the curves
  const room = Math.max(high - low, 1e-6), [from, until] = [curve.at(0, 0) - 1, Math.max(run.now, curve.at(0, 0) + 1)];
  const X = x => box.x + (box.w * (x - from)) / (until - from), Y = y => box.y + box.h * (1 - (y - low) / room);
  for (const value of [low, high]) {
    stroke(ctx, look.grid, 1, [[box.x, Y(value)], [box.x + box.w, Y(value)]]);
    write(ctx, look, short(value), box.x - 4, Y(value) + (value === high ? 4 : -4), look.muted, {align: "right"});
  }
  lines.forEach(([column, colour], number) => {
    const points = [];
    for (let row = 0; row < curve.rows; row++) {
      const value = curve.at(row, column);
      if (!Number.isNaN(value)) points.push([X(curve.at(row, 0)), Y(value)]);
    }
    stroke(ctx, look[colour], 1.6, points, [[], [6, 3], [2, 2], [8, 2, 2, 2], [1, 3]][number % 5]);
  });
}

// ---------------------------------------------------------------- a metric of the reader's choice

// One curve, or one of every lane; its lowest and highest number at the left, the newest at the right.
function metricCurve(ctx, look, run, box, X) {
  const [table, column] = run.points(), [from, until] = run.range(), {lane, head} = run;
  const lanes = table.width > 2 ? head.lanes : 1, mine = table.width > 2 ? lane : 0;
  let low = Infinity, high = -Infinity, newest = NaN;
  for (let row = 0; row < table.rows; row++) {
    if (table.at(row, 0) < from || table.at(row, 0) > until) continue;
    for (let other = 0; other < lanes; other++) {
      const value = table.at(row, column(other));
      if (!Number.isFinite(value)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
      if (other === mine) newest = value;
    }
  }
  ctx.fillStyle = faded(look.focus, 0.04);
  ctx.fillRect(box.x, box.y, box.w, box.h);
  if (!(high >= low)) return;
  const wide = low > 0 && high / low > 50, form = value => (wide ? Math.log(value) : value); // many sizes: in log space
  const room = form(high) - form(low) || 1, share = value => (form(value) - form(low)) / room;
  const Y = value => box.y + 4 + (box.h - 8) * (1 - share(value));
  for (const value of low === high ? [low] : [low, high]) {
    stroke(ctx, look.grid, 1, [[box.x, Y(value)], [box.x + box.w, Y(value)]]);
    write(ctx, look, short(value), box.x - 6, Y(value), look.muted, {align: "right"});
  }
  const points = other => {
    const out = [];
    for (let row = 0; row < table.rows; row++) {
      const value = table.at(row, column(other));
      if (Number.isFinite(value)) out.push([X(table.at(row, 0)), Y(value)]);
    }
    return out;
  };
  inside(ctx, box, 0, () => {
    for (let other = 0; other < lanes; other++) if (other !== mine) stroke(ctx, look.other, 1, points(other));
    stroke(ctx, look.good, 2, points(mine));
  });
  if (Number.isFinite(newest)) write(ctx, look, short(newest), box.x + box.w + 7, Y(newest), look.good, {bold: true});
}

// ---------------------------------------------------------------- the slots of one lane

function slots(ctx, look, run, box, X) {
  inside(ctx, {...box, x: 0, w: box.x + box.w}, 0, () => slotRows(ctx, look, run, box, X));
}

function slotRows(ctx, look, run, box, X) {
  const {states, head} = run, height = box.h / head.slots.length;
  head.slots.forEach((slot, number) => {
    const row = {x: box.x, y: box.y + number * height + 2, w: box.w, h: height - 5};
    ctx.fillStyle = faded(look.focus, 0.05);
    ctx.fillRect(row.x, row.y, row.w, row.h);
    write(ctx, look, slot.name, row.x - 6, row.y + row.h / 2, look.muted, {align: "right"});
    for (let from = 0, until; from < states.rows; from = until) {
      until = endOfStage(run, number, from);
      stageBar(ctx, look, run, number, from, until, row, X);
    }
  });
}

// First row after `from` at which a slot holds another blueprint or stage.
function endOfStage(run, slot, from) {
  const first = run.slot(from, slot, run.lane);
  let row = from + 1;
  for (; row < run.states.rows; row++) {
    const here = run.slot(row, slot, run.lane);
    if (here.stage !== first.stage || here.blueprint !== first.blueprint) break;
  }
  return row;
}

// One stage of a seed: a bar with its name, or its letter where there is no room, filled up to alpha.
function stageBar(ctx, look, run, slot, from, until, box, X) {
  const {states, head, lane} = run, {stage, blueprint} = run.slot(from, slot, lane);
  const place = row => Math.max(box.x, X(states.at(row, 0)));
  const last = Math.max(box.x, X(Math.max(run.now, states.at(states.rows - 1, 0))));
  const left = place(from), right = Math.max(left, until < states.rows ? place(until) : last), bottom = box.y + box.h;
  if (stage <= EMPTY || right <= box.x) return;
  const {word, letter, colour, ink: inkOnIt} = head.stages[stage];
  ctx.fillStyle = faded(colour, 0.28);
  ctx.fillRect(left, box.y, right - left, box.h);
  if (stage >= TAKEN_OUT) hatch(ctx, left, box.y, right - left, box.h, colour);
  ctx.fillStyle = faded(colour, 0.9);
  ctx.beginPath();
  ctx.moveTo(left, bottom);
  for (let row = from; row < until; row++) {
    const y = bottom - box.h * run.slot(row, slot, lane).alpha;
    ctx.lineTo(place(row), y);
    ctx.lineTo(row + 1 < until ? place(row + 1) : right, y);
  }
  ctx.lineTo(right, bottom);
  ctx.fill();
  ctx.strokeStyle = colour;
  ctx.lineWidth = 1;
  ctx.strokeRect(left + 0.5, box.y + 0.5, Math.max(0, right - left - 1), box.h - 1);

  const named = blueprint >= 0 && stage < TAKEN_OUT;
  const long = named ? `${word} · ${head.slots[slot].blueprints[blueprint]}` : word;
  ctx.font = `600 11px ${look.font}`;
  const text = [long, word, letter].find(words => ctx.measureText(words).width < right - left - 8);
  const ink = run.slot(until - 1, slot, lane).alpha > 0.5 ? inkOnIt : look.ink;
  if (text) write(ctx, look, text, left + 5, box.y + box.h / 2 + 0.5, ink, {bold: true});
}

// ---------------------------------------------------------------- the view

// Change what differs: a page whose elements stay where they are is painted faster.
function patch(old, now) {
  if (old.nodeName !== now.nodeName || old.childNodes.length !== now.childNodes.length) {
    old.replaceWith(now);
    return;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== now.data) old.data = now.data;
    return;
  }
  for (const attribute of now.attributes) setOnce(old, attribute.name, attribute.value);
  [...now.childNodes].forEach((node, k) => patch(old.childNodes[k], node));
}

function setOnce(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

const KEY = [ // colour, text, sign, and when it is in the picture: of the run, its limits by kind, its incidents
  ["focus", "{lane} <b></b>", "line", run => !run.overlaid],
  ["muted", "other lanes", "thin", run => run.head.lanes > 1 && !run.overlaid],
  ["limit", "{limit}", "line", (run, has) => has(0) || has(1)],
  ["rise", "rise limit, of the smoothed loss", "dots", (run, has) => has(4)],
  ["chance", "{chance loss}", "band", run => run.status.band && run.head.chance_loss?.[run.lane] > 0],
  ["limit", "⚡\ufe0e fault", "", run => run.faults.length],
  ["limit", "✕ anomaly", "", (run, has, all) => all.length],
  ["limit", "discarded", "veil", (run, has, all) => all.some(i => i.back !== null)],
  ["good", "◇ {snapshot}", "", (run, has, all) => all.some(i => i.back !== null)],
  ["good", "✓ recovered", "", (run, has, all) => all.some(i => i.recovered !== null)],
];

const FRAME = `<div class="esper-key"></div>
<div class="esper-range" role="group" aria-label="batches shown"><select class="esper-metric" aria-label="second curve"
 hidden></select><button data-recent="0">whole run</button><button data-recent="1">last 240</button></div>
<canvas role="img" tabindex="0" data-lm-suppress-shortcuts="true"
 aria-description="Drag over a stretch to see it larger; plus, minus and the arrow keys do the same; Escape shows all.">
</canvas><div class="esper-story" role="status" hidden></div><div class="esper-heads"></div><i class="esper-probe"></i>
<div class="esper-tip" hidden></div><div class="esper-pending" role="status"></div>`;

const WORDS = { // of a page in a notebook; another page gives its own
  waiting: "waiting for the kernel …",
  noAnswer: "no answer from the kernel: if it is idle, run this cell again",
  gone: `<b>The kernel is gone: run this cell again</b>
<span>After a restart, begin with the first cell.</span>`,
  stored: `<b>Not connected to a kernel: run this cell again</b>
<span>It shows what the notebook has stored; its buttons do nothing.</span>`,
};

const REGIONS = [ // parts of the panel, and their names for a screen reader
  [".esper-bar:not(.esper-bar ~ .esper-bar)", "run"], [".esper-bar ~ .esper-bar", "lane and faults"],
  [".esper-grow", "grow"], [".esper-limits", "thresholds"], [".esper-main", "picture and log"],
];

// As much of a text as fits.
function shortened(text, fits) {
  if (fits(text)) return text;
  let kept = text.length;
  while (kept > 1 && !fits(`${text.slice(0, kept)}…`)) kept--;
  return `${text.slice(0, kept)}…`;
}

// Words in braces with the glossary's sentence at the pointer.
function explained(run, text) {
  const quoted = words => words.replaceAll("&", "&amp;").replaceAll('"', "&quot;");
  return text.replace(/\{([^}]+)\}/g, (all, word) => {
    const meaning = run.head.words?.[word.toLowerCase()] ?? run.head.words?.[word.toLowerCase().replace(/s$/, "")];
    return meaning ? `<abbr title="${quoted(meaning)}">${word}</abbr>` : word;
  });
}

// One place on one page that shows a run.
class View {
  constructor(run, element) {
    this.run = run;
    this.element = element;
    element.classList.add("esper-canvas");
    element.innerHTML = FRAME.replaceAll("\n", "");
    this.canvas = element.querySelector("canvas");
    this.tip = element.querySelector(".esper-tip");
    this.pendingText = element.querySelector(".esper-pending");
    this.key = element.querySelector(".esper-key");
    this.heads = element.querySelector(".esper-heads");
    this.probe = element.querySelector(".esper-probe");
    this.buttons = element.querySelectorAll(".esper-range button");
    this.list = element.querySelector(".esper-metric");
    this.story = element.querySelector(".esper-story");
    this.curves = new Layer();
    this.heat = new Layer();
    this.inSight = true;
    this.fresh = true; // not drawn yet
    this.ask = () => this.pending ||= requestAnimationFrame(() => this.draw());
    this.listen();
    this.observe();
    run.changed = this.ask;
    this.ask();
  }

  listen() {
    for (const button of this.buttons) {
      button.onclick = () => {
        this.run.recent = button.dataset.recent === "1";
        this.run.zoom();
      };
    }
    this.list.onchange = () => {
      this.run.chosen = this.list.value;
      this.ask();
    };
    const {canvas} = this;
    canvas.onpointermove = event => {
      this.mouse = {x: event.offsetX, y: event.offsetY};
      this.ask();
    };
    canvas.onpointerleave = () => {
      this.mouse = null;
      this.ask();
    };
    canvas.onpointerdown = event => {
      if (event.button || !this.batchAt(event.offsetX)) return;
      this.press = event.offsetX;
      canvas.setPointerCapture(event.pointerId);
    };
    canvas.onpointerup = event => this.release(event.offsetX, event.offsetY);
    canvas.onpointercancel = () => { this.press = null; };
    canvas.ondblclick = () => this.run.zoom();
    canvas.onwheel = event => this.wheel(event);
    canvas.onkeydown = event => this.pressKey(event);
  }

  // The batch at a place of the picture, kept inside it; null before there is a picture.
  batchAt(x) {
    if (!this.boxes) return null;
    const {loss} = this.boxes, [from, until] = this.run.range();
    return from + ((until - from) * Math.min(Math.max(x - loss.x, 0), loss.w)) / loss.w + 1e-9;
  }

  // A press that ends elsewhere has chosen a stretch; else it was a click on an incident or a lane.
  release(x, y) {
    const {press, run} = this;
    this.press = null;
    if (press === null || press === undefined) return;
    const ends = [press, x].map(at => this.batchAt(at)).sort((a, b) => a - b);
    if (Math.abs(x - press) > DRAG) {
      run.zoom(...ends);
      return;
    }
    const lane = this.laneAt(y), incident = this.incidentAt(x, lane ?? run.lane);
    if (incident) run.goTo(incident);
    else if (lane !== null) run.pick(lane);
  }

  // The incident of a lane at a place of the picture, or none.
  incidentAt(x, lane) {
    const {loss} = this.boxes, [from, until] = this.run.range();
    const X = at => loss.x + (loss.w * (at - from)) / (until - from);
    const near = this.run.incidentsOf(lane).filter(i => Math.abs(X(i.x) - x) < NEAR);
    return near.sort((a, b) => Math.abs(X(a.x) - x) - Math.abs(X(b.x) - x))[0];
  }

  // With Control, or two fingers drawn apart: larger and smaller; sideways, or with Shift: along the run.
  wheel(event) {
    const {run} = this, [from, until] = run.range(), span = until - from;
    const {deltaX, deltaY} = event, sideways = Math.abs(deltaX) > Math.abs(deltaY) ? deltaX : 0;
    const along = sideways || (event.shiftKey ? deltaY : 0);
    if (event.ctrlKey) this.scale(2 ** (event.deltaY / 200), this.batchAt(event.offsetX));
    else if (along && run.window) run.zoom(from + (span * along) / 800, until + (span * along) / 800);
    else return;
    event.preventDefault();
  }

  scale(factor, middle) {
    const {run} = this, [from, until] = run.range();
    const first = middle - (middle - from) * factor, last = middle + (until - middle) * factor;
    if (first <= 0 && last >= run.now) run.zoom();
    else run.zoom(first, last);
  }

  pressKey(event) {
    const {run} = this, [from, until] = run.range(), step = (until - from) / 4;
    const acts = {
      "+": () => this.scale(0.5, (from + until) / 2), "=": () => this.scale(0.5, (from + until) / 2),
      "-": () => this.scale(2, (from + until) / 2), Escape: () => run.zoom(),
      ArrowLeft: () => run.window && run.zoom(from - step, until - step),
      ArrowRight: () => run.window && run.zoom(from + step, until + step),
    };
    if (!acts[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    acts[event.key]();
    event.preventDefault();
    event.stopPropagation();
  }

  observe() {
    const size = new ResizeObserver(this.ask);
    size.observe(this.element);
    const sight = new IntersectionObserver(entries => {
      this.inSight = entries[entries.length - 1].isIntersecting;
      this.ask();
    });
    sight.observe(this.element);
    const theme = new MutationObserver(() => this.restyle());
    const attributeFilter = ["class", "style", "data-jp-theme-name", "data-jp-theme-light"];
    theme.observe(document.body, {attributes: true, attributeFilter});
    this.observers = [size, sight, theme];
    // a theme's colours may arrive long after its name: the probe has the ground's colour, and tells when it changes
    this.probe.ontransitionend = () => this.restyle();
    this.clock = setInterval(() => this.tick(), 500);
  }

  restyle() {
    this.look = null;
    this.ask();
  }

  // Listen to the buttons of the panel around the picture, as soon as it is on the page.
  attach() {
    const panel = this.element.closest(".esper");
    if (!panel || this.panel === panel) return;
    this.panel = panel;
    this.onpress = event => {
      const button = event.target.closest("button.widget-button");
      if (!button || button.disabled) return;
      if (button.classList.contains("esper-queued")) event.stopImmediatePropagation();
      else this.request(button);
    };
    panel.addEventListener("click", this.onpress, true);
    this.ongo = event => {
      const number = event.target.closest?.("[data-go]")?.dataset.go, incident = this.run.incidents.get(+number);
      if (!incident || (event.type === "keydown" && event.key !== "Enter")) return;
      this.run.goTo(incident);
      this.canvas.scrollIntoView({block: "nearest"});
    };
    panel.addEventListener("click", this.ongo);
    panel.addEventListener("keydown", this.ongo);
    this.onenter = () => this.run.ask();
    panel.addEventListener("pointerenter", this.onenter);
  }

  // A page that has just run all its cells shows the last cell, but not its output: keep the panel in sight until its
  // buttons have their places and the page has done its own scrolling, or until the reader moves.
  keepInSight() {
    if (this.fresh) {
      this.fresh = false;
      this.settled = this.run.age < 20 ? performance.now() + SETTLING : 0;
      const stop = () => {
        this.settled = 0;
      };
      for (const move of ["wheel", "pointerdown", "keydown"]) {
        document.addEventListener(move, stop, {once: true, capture: true});
      }
    }
    if (performance.now() < this.settled) (this.panel ?? this.element).scrollIntoView({block: "nearest"});
  }

  // The run may be in the midst of a step, the kernel busy with another cell: a button shows at once that it was
  // pressed, and takes no second click until a packet answers.
  request(button) {
    const {run} = this, before = Math.max(run.status?.answered ?? 0, ...run.requests.map(request => request.answer));
    run.requests.push({button, text: button.innerText.trim(), answer: before + 1, at: performance.now()});
    this.showRequests();
  }

  showRequests() {
    const {run} = this, now = performance.now();
    run.requests = run.requests.filter(request => now - request.at < 120_000);
    const queued = new Set(run.requests.map(request => request.button));
    for (const button of this.panel?.querySelectorAll("button.widget-button") ?? []) {
      button.classList.toggle("esper-queued", queued.has(button));
      if (queued.has(button)) setOnce(button, "aria-busy", "true");
      else button.removeAttribute("aria-busy");
    }
    const oldest = run.requests[0], seconds = oldest ? Math.round((now - oldest.at) / 1000) : 0;
    const text = seconds < 2 || run.gone ? "" : `${oldest.text}: requested ${seconds} s ago; the kernel is busy`;
    if (this.pendingText.textContent !== text) this.pendingText.textContent = text;
  }

  // Twice a second: what waits for the kernel, and whether there is one.
  tick() {
    const {run} = this, busy = run.requests.length > 0 || run.status?.state === "running";
    if (run.requests.length) this.showRequests();
    if (!this.fresh) this.keepInSight();
    if (!run.head) this.ask();
    const silent = performance.now() - run.heard > SILENCE[busy ? 0 : 1];
    if (silent && !run.gone && !document.hidden && this.element.isConnected) run.ask();
  }

  // A veil over a panel that no kernel listens to: it is gone, or the page shows only what the notebook has stored.
  showGone() {
    const {run, panel} = this, shown = panel?.querySelector(":scope > .esper-gone");
    const stored = !run.head && this.element.closest(".jupyter-widgets-disconnected");
    const why = run.gone ? run.words.gone : stored ? run.words.stored : "";
    if (!panel || (shown?.why ?? "") === why) return;
    shown?.remove();
    if (!why) return;
    const veil = document.createElement("div");
    veil.className = "esper-gone";
    veil.setAttribute("role", "alert");
    veil.innerHTML = veil.why = why;
    panel.append(veil);
  }

  // Names for screen readers. Arrow keys belong to a list or a slider that has
  // the focus, and not to the notebook around it.
  name() {
    for (const [part, name] of REGIONS) {
      for (const e of this.panel?.querySelectorAll(part) ?? []) {
        setOnce(e, "role", "group");
        setOnce(e, "aria-label", name);
      }
    }
    for (const e of this.panel?.querySelectorAll("button.esper-fault:not([aria-label])") ?? []) {
      e.setAttribute("aria-label", `provoke ${e.textContent.trim()}`);
    }
    for (const e of this.panel?.querySelectorAll("select, .noUi-handle, .widget-readout") ?? []) {
      e.dataset.lmSuppressShortcuts = "true";
    }
    for (const row of this.panel?.querySelectorAll(".esper-row:not([data-named])") ?? []) {
      const what = row.querySelector(".widget-label")?.textContent ?? "";
      const handle = row.querySelector(".noUi-handle"), box = row.querySelector("input[type=checkbox]");
      if (!what || !handle) continue;
      row.dataset.named = what;
      handle.setAttribute("aria-label", what);
      const readout = row.querySelector(".widget-readout");
      readout?.setAttribute("aria-label", `${what}, as a number`);
      readout?.setAttribute("role", "textbox");
      box?.setAttribute("aria-label", `${what} on`);
    }
  }

  close() {
    this.panel?.removeEventListener("click", this.onpress, true);
    for (const event of ["click", "keydown"]) this.panel?.removeEventListener(event, this.ongo);
    this.panel?.removeEventListener("pointerenter", this.onenter);
    this.panel?.querySelector(":scope > .esper-gone")?.remove();
    clearInterval(this.clock);
    this.run.close();
    for (const observer of this.observers) observer.disconnect();
    cancelAnimationFrame(this.pending);
  }

  // The lane at a height of the strip, or null.
  laneAt(y) {
    const box = this.boxes?.strip;
    if (!box || y < box.y || y >= box.y + box.h) return null;
    return Math.floor(((y - box.y) / box.h) * this.run.head.lanes);
  }

  // The text around the picture changes in the same frame as the picture.
  updateText() {
    for (const [name, text] of Object.entries(this.run.html)) {
      const place = this.element.closest(".esper")?.querySelector(`.esper-says-${name} .widget-html-content`);
      if (!place || place.shown === text) continue;
      const template = document.createElement("template");
      template.innerHTML = text;
      place.shown = text;
      const now = template.content;
      if (place.childNodes.length !== now.childNodes.length) place.replaceChildren(now);
      else [...now.childNodes].forEach((node, k) => patch(place.childNodes[k], node));
    }
  }

  // Where the panels stand: losses, all lanes, slots, and the line below them.
  layout(width) {
    const {head, height, grown} = this.run, many = head.lanes > 1, some = head.slots.length > 0 && grown;
    const slots = some ? head.slots.length * SLOT : 0;
    const most = Math.min(head.lanes * 5, 0.3 * +this.run.model.get("height")); // the curve keeps its room
    const lanes = many ? Math.max(most, Math.min(head.lanes * 12, 118)) : 0, metric = this.run.points() ? METRIC : 0;
    const charts = this.run.learns ? CHARTS + GAP : 0;
    const gaps = GAP * [some, many, metric].filter(Boolean).length;
    const rest = height - slots - lanes - metric - charts - gaps - 34;
    const {left, right} = width < NARROW.below ? NARROW : {left: LEFT, right: RIGHT};
    const box = (y, h) => ({x: left, y, w: Math.max(80, width - left - right), h, right});
    const loss = box(16, rest), own = metric ? box(loss.y + rest + GAP, metric) : null;
    const above = own ? own.y + own.h : loss.y + rest, strip = many ? box(above + GAP, lanes) : null;
    const after = strip ? strip.y + strip.h : above, bottom = some ? after + GAP + slots : after;
    const learn = charts ? {x: 0, y: bottom + GAP + GAP, w: width, h: CHARTS - GAP} : null;
    return {loss, metric: own, strip, slots: some ? box(after + GAP, slots) : null, bottom, learn};
  }

  draw() {
    this.pending = 0;
    const {run, canvas} = this, width = this.element.clientWidth, ready = run.head && run.status;
    if (width && !ready) {
      this.attach();
      this.showGone();
      this.key.textContent = run.words[performance.now() - run.began < LATE ? "waiting" : "noAnswer"];
      canvas.style.height = `${run.height}px`;
    }
    if (!width || !ready) return;
    this.attach();
    this.name();
    this.showRequests();
    this.showGone();
    this.updateText();
    this.keepInSight();
    const what = `Training loss of every ${run.head.axis[0]}`;
    const said = [what, run.status.state, run.laneName(run.lane), count(run.incidents.size)];
    setOnce(canvas, "aria-label", said.join(", "));
    if (!this.inSight) return; // the text may still be in sight, the picture is not
    this.look ||= lookOf(this.element);
    this.boxes = this.layout(width);
    const ctx = this.clear(width), {loss} = this.boxes, [from, until] = run.range();
    const X = batch => loss.x + (loss.w * (batch - from)) / (until - from);
    this.panels(ctx, X, what);
    this.axis(ctx, X, from, until);
    this.hover(ctx, X, from, until);
    this.stretch(ctx);
    this.legend();
    this.tellStory();
  }

  clear(width) {
    const {canvas} = this, {height} = this.run, dpr = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * dpr) || canvas.height !== Math.round(height * dpr)) {
      canvas.width = Math.round(width * dpr);
      canvas.height = Math.round(height * dpr);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const ctx = canvas.getContext("2d");
    ctx.setTransform(dpr, 0, 0, dpr, 0, 0);
    ctx.clearRect(0, 0, width, height);
    return ctx;
  }

  panels(ctx, X, what) {
    const {run, look, boxes} = this;
    losses(ctx, look, run, boxes.loss, X, this.curves);
    if (boxes.metric) metricCurve(ctx, look, run, boxes.metric, X);
    if (boxes.strip) strip(ctx, look, run, boxes.strip, X, this.heat);
    if (boxes.learn) charts(ctx, look, run, boxes.learn);
    if (boxes.slots) slots(ctx, look, run, boxes.slots, X);
    this.titles(ctx, [
      [boxes.loss, `${what}, {nats}`, `Loss of every ${run.head.axis[0]}, {nats}`, "Loss, {nats}"],
      [boxes.metric, run.metric.replace(/[{}]/g, "")],
      [boxes.strip, run.overlaid ? "All runs: stronger colour, higher loss; click one to select it" : "",
        "All {lanes}: stronger colour, higher loss; click one to select it",
        run.overlaid ? "All runs: click one" : "All {lanes}: click one"],
      [boxes.slots, `{Slots} of lane ${run.lane}: stage, filled up to {alpha}`, `{Slots} of lane ${run.lane}`],
    ]);
  }

  // Titles are text of the page, so that their words can be explained; of several, the first that has room.
  titles(ctx, all) {
    const shown = all.filter(([box]) => box), top = this.canvas.offsetTop;
    while (this.heads.childElementCount < shown.length) this.heads.append(document.createElement("div"));
    ctx.font = `600 12px ${this.look.font}`;
    [...this.heads.children].forEach((title, k) => {
      const [box, ...texts] = shown[k] ?? [null];
      const at = box ? `top: ${top + box.y - TITLE - 13}px; left: ${box.x}px` : "display: none";
      setOnce(title, "style", at);
      const room = box ? box.w + box.right : 0, bare = text => text.replace(/[{}]/g, "");
      const fits = words => ctx.measureText(bare(words)).width <= room;
      const text = texts.find(words => words && fits(words)) ?? shortened(bare(texts.at(-1) ?? ""), fits);
      if (text === title.text) return;
      title.text = text;
      title.innerHTML = explained(this.run, text ?? "");
    });
  }

  axis(ctx, X, from, until) {
    const {look, boxes} = this, {loss, bottom} = boxes;
    for (const batch of ticks(from, until, Math.max(2, loss.w / 80))) {
      write(ctx, look, String(batch), X(batch), bottom + 5, look.muted, {align: "center", base: "top"});
      stroke(ctx, look.grid, 1, [[X(batch), bottom], [X(batch), bottom + 4]]);
    }
    write(ctx, look, this.run.head.axis[0], loss.x + loss.w + 26, bottom + 5, look.muted, {base: "top"});
  }

  hover(ctx, X, from, until) {
    const {mouse, run, look, boxes} = this, {loss} = boxes;
    this.tip.hidden = !(mouse && mouse.x >= loss.x && mouse.x <= loss.x + loss.w && run.loss.rows);
    if (this.tip.hidden) return;
    const row = run.loss.find(from + ((until - from) * (mouse.x - loss.x)) / loss.w);
    const batch = run.loss.at(row, 0), x = X(batch);
    stroke(ctx, look.muted, 1, [[x, loss.y], [x, boxes.bottom]], [2, 3]);
    this.tip.textContent = this.wordsAt(row, batch, this.laneAt(mouse.y) ?? run.lane).join("\n");
    this.tip.style.left = `${Math.min(x + 12, this.element.clientWidth - 190)}px`;
    this.tip.style.top = `${Math.max(0, mouse.y - 10) + this.canvas.offsetTop}px`;
  }

  // What is being dragged over.
  stretch(ctx) {
    const {press, mouse, look, boxes: {loss, bottom}} = this;
    if (press === null || press === undefined || !mouse || Math.abs(mouse.x - press) <= DRAG) return;
    const kept = [press, mouse.x].map(x => Math.min(Math.max(x, loss.x), loss.x + loss.w));
    const [left, right] = kept.sort((a, b) => a - b);
    ctx.fillStyle = faded(look.focus, 0.14);
    ctx.fillRect(left, loss.y, right - left, bottom - loss.y);
    for (const x of [left, right]) stroke(ctx, look.focus, 1, [[x, loss.y], [x, bottom]]);
  }

  tellStory() {
    const text = this.run.incidents.get(this.run.told)?.story ?? "";
    if (this.story.textContent !== text) this.story.textContent = text;
    if (this.story.hidden === Boolean(text)) this.story.hidden = !text;
  }

  wordsAt(row, batch, lane) {
    const {run} = this, {head} = run, state = run.states.find(batch);
    const value = run.lossOf(row, lane), limit = run.limit(state, lane, 0);
    const lines = [`${head.axis[0]} ${batch}, ${run.laneName(lane)}`];
    if (Number.isNaN(value)) lines.push("loss not measured");
    else lines.push(`loss ${Number.isFinite(value) ? short(value) : "not finite"}`);
    if (limit > 0) lines.push(`limit ${short(limit)}`);
    const [table, column] = run.points() ?? [];
    const own = table?.rows ? table.at(table.find(batch), column(lane)) : NaN;
    if (Number.isFinite(own)) lines.push(`${run.metric} ${short(own)}`);
    head.slots.forEach((slot, number) => {
      const {stage, blueprint, alpha} = run.slot(state, number, lane);
      if (stage <= EMPTY) return;
      const name = slot.blueprints[blueprint] ?? "";
      lines.push(`${slot.name}: ${head.stages[stage].word} ${name}, alpha ${alpha.toFixed(2)}`);
    });
    return lines;
  }

  // The signs that occur in the picture.
  legend() {
    const {run, look} = this, {states} = run, all = [...run.incidents.values()];
    const has = kind => states.rows > 0 && run.limit(states.rows - 1, run.lane, kind) > 0;
    const shown = KEY.filter(([, , , occurs]) => occurs(run, has, all));
    const text = shown.map(([name, words, sign]) => {
      const said = explained(run, words).replace("<b></b>", `<b>${run.lane}</b>`);
      return `<span style="color:${look[name]}">${sign ? `<i class="${sign}"></i>` : ""}${said}</span>`;
    }).join("");
    if (this.key.shown !== text) this.key.innerHTML = this.key.shown = text;
    const names = run.metricNames, known = names.join("\n");
    if (this.list.known !== known) {
      this.list.known = known;
      this.list.replaceChildren(new Option("no second curve", ""), ...names.map(name => new Option(name, name)));
      this.list.hidden = !names.length;
      this.key.classList.toggle("esper-beside", names.length > 0);
    }
    if (this.list.value !== run.metric) this.list.value = run.metric;
    for (const button of this.buttons) {
      const recent = button.dataset.recent === "1", newest = `last 240 ${run.head.axis[1]}`;
      setOnce(button, "aria-pressed", String(recent === run.recent && !run.window));
      if (recent && button.textContent !== newest) button.textContent = newest;
    }
  }
}

export default {
  render({model, el}) {
    const view = new View(new Run(model), el);
    return () => view.close();
  },
};
