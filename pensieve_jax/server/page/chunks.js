// The map of chunks: a row for each branch, a cell for each chunk, a colour for each tier. Each conversation has a
// title, in the order of the list.

import { make } from "./dom.js";
import { nameOf } from "./list.js";

const STATES = { g: "gpu", b: "both", c: "cpu", l: "loading", v: "loading", d: "dropped" };
const NAMES = { gpu: "device", both: "device and host", cpu: "host", loading: "on its way", dropped: "dropped" };
const DETAILS = {
  gpu: "In device memory; in the bar of a reply: found there",
  both: "In device memory, with a copy in host memory",
  cpu: "In host memory; in the bar of a reply: copied back from there",
  loading: "Copied between the two",
  dropped: "In neither, so the next turn computes it again; in the bar of a reply: computed again",
  new: "In the bar of a reply: tokens that were computed for the first time",
};
const CELL = { width: 10, height: 14, gap: 2 };
const TITLE = { height: 20, base: 14, font: "12.5px system-ui, sans-serif" };
const UNLISTED = { known: "not in the list", begins: "a first turn, being answered" };

/** An entry of the legend, which explains the map and the bars of replies. */
function entry(colour, ...words) {
  const item = Object.assign(make("li"), { title: DETAILS[colour] });
  item.append(make("i", colour), ...words);
  return item;
}

/** Expand run lengths: "3g2c1d" is three chunks on the device, two in host memory and one dropped. */
export function unpack(runs) {
  return [...runs.matchAll(/(\d+)([a-z])/g)].flatMap(([, count, letter]) => Array(Number(count)).fill(STATES[letter]));
}

/** A branch's cells; null where another row shows them. The server omits chunks dropped at the end: add them. */
function cellsOf(branch, chunkTokens) {
  const cells = [...Array(branch.first).fill(null), ...unpack(branch.states)];
  const num = Math.ceil((branch.num_tokens - 1) / chunkTokens); // the last token has no KV cache entry
  if (branch.turn_id && !branch.busy) while (cells.length < num) cells.push("dropped");
  return cells;
}

/** Shorten a text to the available width. */
function fitted(pen, text, width) {
  let short = text.slice(0, 120);
  while (short && pen.measureText(`${short}…`).width > width) short = short.slice(0, -1);
  return short === text ? text : `${short}…`;
}

export class ChunkMap {
  /** `strip` shows the same chunks in one line; `open(root)` is called for a click on a conversation. */
  constructor({ canvas, legend, totals, strip }, open) {
    Object.assign(this, { canvas, totals, strip });
    this.counts = {};
    this.places = []; // {root, bottom} of the rows, from top to bottom
    for (const [state, name] of Object.entries(NAMES)) {
      this.counts[state] = make("b");
      legend.append(entry(state, `${name} `, this.counts[state]));
      strip.append(make("i", state));
    }
    legend.append(entry("new", "new tokens"));
    const at = (event) => this.places.find((place) => event.offsetY < place.bottom)?.root;
    canvas.onclick = (event) => at(event) && open(at(event));
    canvas.onmousemove = (event) => (canvas.style.cursor = at(event) ? "pointer" : "");
  }

  /** Draw the map that the server sent; return whether the branch of `turn` is in it, which is framed. */
  draw(latest, turn, listed) {
    const names = new Map(listed.map((row, index) => [row.root, { index, name: nameOf(row) }]));
    const rows = latest.branches.map((branch) => {
      const root = branch.turn_id?.slice(0, 16);
      const row = names.get(root) ?? { index: listed.length, name: root ? UNLISTED.known : UNLISTED.begins };
      return { ...row, root: names.has(root) ? root : null, turn: branch.turn_id, cells: cellsOf(branch, latest.chunk_tokens) };
    });
    rows.sort((one, other) => one.index - other.index || one.name.localeCompare(other.name));
    const isFramed = rows.some((row) => row.turn && row.turn === turn);
    this.canvas.dataset.framed = isFramed;
    this.#tell(latest, rows);
    if (this.canvas.clientWidth) this.#paint(rows, turn); // a closed drawer has no width
    return isFramed;
  }

  #tell(latest, rows) {
    const counts = Object.fromEntries(Object.keys(NAMES).map((state) => [state, 0]));
    for (const state of rows.flatMap((row) => row.cells)) if (state) counts[state] += 1;
    for (const [state, count] of Object.entries(counts)) {
      this.counts[state].textContent = count;
      this.strip.querySelector(`.${state}`).style.flexGrow = count;
    }
    this.strip.hidden = !rows.length;
    const free = (count, all, name) => (count === undefined ? `${all} ${name}.` : `${count} of ${all} ${name} free.`);
    this.totals.textContent =
      `Device: ${free(latest.free_gpu_pages, latest.gpu_pages, "pages")}\n` +
      `Host: ${free(latest.free_cpu_pages, latest.cpu_pages, "slots")}`;
    const words = Object.entries(counts).map(([state, count]) => `${count} ${NAMES[state]}`).join(", ");
    const branches = rows.length === 1 ? "1 branch" : `${rows.length} branches`;
    this.canvas.setAttribute("aria-label", `${branches}; chunks: ${words}`);
  }

  #paint(rows, turn) {
    const width = this.canvas.clientWidth;
    const perRow = Math.max(1, Math.floor((width - 4) / CELL.width));
    const linesOf = (row) => Math.max(1, Math.ceil(row.cells.length / perRow));
    let height = 4;
    this.places = [];
    rows.forEach((row, index) => {
      const above = rows[index - 1];
      row.hasTitle = !above || row.index !== above.index || row.name !== above.name;
      if (row.hasTitle) height += TITLE.height;
      row.top = height;
      height += linesOf(row) * CELL.height + 6;
      this.places.push({ root: row.root, bottom: height });
    });
    const scale = devicePixelRatio;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = TITLE.font;
    const colours = this.#colours();
    for (const row of rows) this.#paintRow(pen, row, { width, perRow, lines: linesOf(row), turn, colours });
  }

  /** The current colours of the style sheet: a canvas does not resolve variables or light-dark(). */
  #colours() {
    const resolved = (name) => {
      this.canvas.style.color = `var(--${name})`;
      return [name, getComputedStyle(this.canvas).color];
    };
    return Object.fromEntries([...Object.keys(NAMES), "ink", "faint"].map(resolved));
  }

  #paintRow(pen, row, { width, perRow, lines, turn, colours }) {
    const isOpen = Boolean(turn) && row.turn?.slice(0, 16) === turn.slice(0, 16);
    if (row.hasTitle) {
      pen.fillStyle = isOpen ? colours.ink : colours.faint;
      pen.fillText(fitted(pen, row.name, width - 4), 2, row.top - TITLE.height + TITLE.base);
    }
    row.cells.forEach((state, index) => {
      const [x, y] = [3 + (index % perRow) * CELL.width, row.top + Math.floor(index / perRow) * CELL.height];
      // The shared prefix of a fork is drawn once, in another branch's row; here it is a thin line.
      pen.fillStyle = colours[state ?? "faint"];
      if (state === null) pen.fillRect(x, y + (CELL.height - 2) / 2, CELL.width, 1);
      else pen.fillRect(x, y, CELL.width - CELL.gap, CELL.height - 2);
    });
    if (turn && row.turn === turn) {
      pen.strokeStyle = colours.ink;
      pen.strokeRect(0.5, row.top - 2.5, Math.min(row.cells.length, perRow) * CELL.width + 3, lines * CELL.height + 2);
    }
  }
}
