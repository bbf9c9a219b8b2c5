// The list of conversations, by day, latest first, and the search in it. The list is one Tab stop; the arrow keys move
// within it, and F2 or the arrow to the right lead to what can be done with a conversation.

import { get } from "./api.js";
import { make, makeButton } from "./dom.js";

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

/** The name of a row of the list: the one it was given, or the beginning of its first message. */
export const nameOf = (row) => row.title || row.first_text || "(no text)";

export class List {
  /** `manage(row)` opens what can be done with a conversation; `more()` loads more rows. */
  constructor({ nav, search, found }, { manage, more }) {
    Object.assign(this, { nav, search, found, manage, more });
    this.rows = []; // {root, title, num_turns, first_text, last_active}, as the server sends them
    this.isWhole = false; // whether `rows` are all that the server lists
    this.most = STEP;
    this.current = null;
    nav.addEventListener("keydown", (event) => this.#walk(event));
    search.addEventListener("input", () => this.#seek());
  }

  /** Load the rows; while the user searches, all that the server lists. */
  async load() {
    const limit = this.#words.length ? MOST : Math.min(this.most + 1, MOST);
    this.rows = (await get(`/v1/pensieve/trees?limit=${limit}`)).data;
    this.isWhole = this.rows.length < limit || limit === MOST;
    this.show(this.current);
  }

  /** Show the rows, with the conversation `current` marked. */
  show(current) {
    this.current = current;
    const had = this.nav.contains(document.activeElement) ? document.activeElement.dataset : undefined;
    const shown = [];
    let day = "";
    const rows = this.#matching();
    for (const row of rows.slice(0, this.most)) {
      const date = new Date(row.last_active * 1000);
      if (dayOf(date) !== day) {
        day = dayOf(date);
        shown.push(make("h2", "", day));
      }
      shown.push(this.#row(row, date));
    }
    if (rows.length > this.most) shown.push(this.#more());
    this.nav.replaceChildren(...shown);
    for (const stop of this.#stops("a, button")) stop.tabIndex = -1;
    const links = this.#stops();
    const stop = links.find((link) => link.ariaCurrent) ?? links[0];
    if (stop) stop.tabIndex = 0;
    if (had) this.#stops("a, button").find((stop) => stop.dataset.root === had.root && stop.dataset.is === had.is)?.focus();
  }

  /** Focus the link of a conversation, or the first one. */
  focus(root) {
    const links = this.#stops();
    (links.find((link) => link.dataset.root === root) ?? links[0] ?? this.search).focus();
  }

  get #words() {
    return this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
  }

  #matching() {
    const words = this.#words;
    const rows = this.rows.filter((row) => words.every((word) => `${row.title ?? ""} ${row.first_text}`.toLowerCase().includes(word)));
    const count = rows.length === 1 ? "1 conversation" : `${rows.length || "No"} conversations`;
    const limit = this.rows.length >= MOST ? ` among the latest ${MOST}` : "";
    this.found.textContent = words.length ? `${count} found${limit}` : "";
    return rows;
  }

  #seek() {
    this.show(this.current);
    if (this.#words.length && !this.isWhole) this.more();
  }

  #row(row, date) {
    const box = make("div", "row");
    const link = Object.assign(make("a", "", nameOf(row)), { href: `#${row.root}` });
    link.title = `${row.num_turns} ${row.num_turns === 1 ? "turn" : "turns"}, ${date.toLocaleString("en")}`;
    if (row.root === this.current) link.ariaCurrent = "page";
    const manage = makeButton("⋯", () => this.manage(row), `Rename or delete: ${nameOf(row)}`);
    Object.assign(link.dataset, { root: row.root, is: "link" });
    Object.assign(manage.dataset, { root: row.root, is: "manage" });
    box.append(link, manage);
    return box;
  }

  #more() {
    const more = makeButton("Show more", async () => {
      const first = this.most;
      this.most += STEP;
      await this.more();
      this.#stops()[first]?.focus();
    });
    more.classList.add("more");
    return more;
  }

  #stops(kinds = "a, .more") {
    return [...this.nav.querySelectorAll(kinds)];
  }

  #walk(event) {
    const row = document.activeElement.closest(".row");
    const stops = this.#stops();
    const at = stops.indexOf(row?.querySelector("a") ?? document.activeElement);
    const manage = row?.querySelector("button");
    if (event.key === "F2" || event.key === "Delete") {
      if (manage) (event.preventDefault(), manage.click());
      return;
    }
    const to = { ArrowDown: stops[at + 1], ArrowUp: stops[at - 1], Home: stops[0], End: stops.at(-1) };
    Object.assign(to, { ArrowRight: manage, ArrowLeft: stops[at] });
    if (at < 0 || !to[event.key]) return;
    event.preventDefault();
    to[event.key].focus();
  }
}
