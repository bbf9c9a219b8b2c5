// The map of chunks: a row for each branch, a cell for each chunk, a colour for each tier.

const STATES = { g: "gpu", b: "both", c: "cpu", l: "loading", v: "loading", d: "dropped" };
const NAMES = { gpu: "device", both: "device and host", cpu: "host", loading: "on its way", dropped: "dropped" };
const CELL = { width: 10, height: 14, gap: 2 };

/** "3g2c1d" is three on the device, two in host memory and one dropped. */
export function unpack(runs) {
  return [...runs.matchAll(/(\d+)([a-z])/g)].flatMap(([, count, letter]) => Array(Number(count)).fill(STATES[letter]));
}

export class ChunkMap {
  constructor(canvas, legend, totals) {
    this.canvas = canvas;
    this.totals = totals;
    this.counts = {};
    for (const [state, name] of Object.entries(NAMES)) {
      const mark = Object.assign(document.createElement("i"), { className: state });
      const count = document.createElement("b");
      const item = document.createElement("li");
      item.append(mark, `${name} `, count);
      legend.append(item);
      this.counts[state] = count;
    }
  }

  /** Draw what the server told; `current` is the id of the turn whose branch is framed. */
  draw(told, current) {
    const style = getComputedStyle(document.documentElement);
    const width = this.canvas.clientWidth;
    const perRow = Math.max(1, Math.floor((width - 4) / CELL.width));
    // A fork's beginning is drawn once, with the branch before it: its own row begins where it left that.
    const rows = told.branches.map((branch) => ({
      branch,
      cells: [...Array(branch.first).fill(null), ...unpack(branch.states)],
    }));
    const linesOf = (row) => Math.max(1, Math.ceil(row.cells.length / perRow));
    const height = rows.reduce((sum, row) => sum + linesOf(row) * CELL.height + 6, 4);
    const scale = devicePixelRatio;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    const counts = Object.fromEntries(Object.keys(NAMES).map((state) => [state, 0]));
    let top = 4;
    this.canvas.dataset.framed = rows.some((row) => row.branch.turn_id === current);
    for (const row of rows) {
      row.cells.forEach((state, index) => {
        const [x, y] = [2 + (index % perRow) * CELL.width, top + Math.floor(index / perRow) * CELL.height];
        if (state === null) {
          pen.fillStyle = style.getPropertyValue("--line");
          pen.fillRect(x, y + (CELL.height - 2) / 2, CELL.width, 1);
          return;
        }
        counts[state] += 1;
        pen.fillStyle = style.getPropertyValue(`--${state}`);
        pen.fillRect(x, y, CELL.width - CELL.gap, CELL.height - 2);
      });
      if (row.branch.turn_id === current) {
        pen.strokeStyle = style.getPropertyValue("--ink");
        pen.strokeRect(0.5, top - 2.5, Math.min(row.cells.length, perRow) * CELL.width + 3, linesOf(row) * CELL.height + 2);
      }
      top += linesOf(row) * CELL.height + 6;
    }
    for (const [state, count] of Object.entries(counts)) this.counts[state].textContent = count;
    this.totals.textContent =
      `Device memory: ${told.free_gpu_pages} of ${told.gpu_pages} pages free. ` +
      `Host memory: ${told.free_cpu_pages} of ${told.cpu_pages} slots free.`;
    const words = Object.entries(counts).map(([state, count]) => `${count} ${NAMES[state]}`).join(", ");
    this.canvas.setAttribute("aria-label", `${rows.length} branches; chunks: ${words}`);
  }
}
