// The list of conversations, by day, latest first. It is one Tab stop; the arrow keys move within it.

import { get } from "./api.js";

const STEP = 50;
const MOST = 1000; // the server's limit of rows
const DAY_MS = 86_400_000;

function dayOf(date) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (date >= midnight) return "Today";
  if (date >= midnight - DAY_MS) return "Yesterday";
  const year = date.getFullYear() === new Date().getFullYear() ? undefined : "numeric";
  return date.toLocaleDateString("en", { day: "numeric", month: "long", year });
}

export class List {
  constructor(nav) {
    this.nav = nav;
    this.rows = []; // {root, num_turns, first_text, last_active}, as the server sends them
    this.most = STEP;
    nav.addEventListener("keydown", (event) => this.#walk(event));
  }

  async load(current) {
    const found = await get(`/v1/pensieve/trees?limit=${Math.min(this.most + 1, MOST)}`);
    this.rows = found.data;
    this.show(current);
  }

  show(current) {
    const had = this.nav.contains(document.activeElement) ? document.activeElement.dataset.root : undefined;
    const shown = [];
    let day = "";
    for (const row of this.rows.slice(0, this.most)) {
      const date = new Date(row.last_active * 1000);
      if (dayOf(date) !== day) {
        day = dayOf(date);
        shown.push(Object.assign(document.createElement("h2"), { textContent: day }));
      }
      shown.push(this.#link(row, date, current));
    }
    if (this.rows.length > this.most) shown.push(this.#more());
    this.nav.replaceChildren(...shown);
    const links = this.#stops();
    for (const link of links) link.tabIndex = -1;
    const stop = links.find((link) => link.ariaCurrent) ?? links[0];
    if (stop) stop.tabIndex = 0;
    if (had !== undefined) links.find((link) => link.dataset.root === had)?.focus();
  }

  #link(row, date, current) {
    const link = Object.assign(document.createElement("a"), { href: `#${row.root}`, textContent: row.first_text || "(no text)" });
    link.dataset.root = row.root;
    link.title = `${row.num_turns} ${row.num_turns === 1 ? "turn" : "turns"}, ${date.toLocaleString("en")}`;
    if (row.root === current) link.ariaCurrent = "page";
    return link;
  }

  #more() {
    const more = Object.assign(document.createElement("button"), { type: "button", textContent: "Show more" });
    more.onclick = async () => {
      const first = this.most;
      this.most += STEP;
      await this.onmore();
      this.#stops()[first]?.focus();
    };
    return more;
  }

  #stops() {
    return [...this.nav.querySelectorAll("a, button")];
  }

  #walk(event) {
    const stops = this.#stops();
    const at = stops.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: stops.length - 1 }[event.key];
    if (at < 0 || stops[to] === undefined) return;
    event.preventDefault();
    stops[to].focus();
  }
}
