// The turns of the shown branch. Text of users and models is only set as textContent, never as HTML.

const make = (tag, className, text) => Object.assign(document.createElement(tag), { className, textContent: text ?? "" });

const PARTS = [
  ["reused", "gpu_tokens", "found on the device"],
  ["swapped", "cpu_tokens", "copied back from host memory"],
  ["recomputed", "recomputed_tokens", "computed again"],
  ["new", "prefilled_tokens", "new"],
];

/** Show where a turn's tokens came from, as a bar and in words. */
function account(usage) {
  const bar = make("div", "bar");
  for (const [name, field] of PARTS) {
    const part = make("span", name);
    part.style.flexGrow = usage[field];
    bar.append(part);
  }
  const words = PARTS.filter(([, field]) => usage[field]).map(([, field, what]) => `${usage[field]} ${what}`);
  return [bar, make("span", "told", `tokens: ${words.join(", ")}`)];
}

export class Messages {
  /** `say(input, parent)` sends a turn; `look(id)` shows the branch of a turn. */
  constructor(section, { say, look }) {
    this.section = section;
    this.say = say;
    this.look = look;
    this.isBusy = false;
  }

  /** Show a tree's path, or `greeting` if the tree is empty. */
  show(tree, { isBusy = false, greeting = "" } = {}) {
    this.tree = tree;
    this.isBusy = isBusy;
    const had = this.section.contains(document.activeElement) ? document.activeElement.dataset.act : undefined;
    const shown = [];
    let instructions = null;
    const path = tree.path;
    if (path[0]?.parent) shown.push(make("p", "before", "Earlier turns are not shown; the conversation goes on from them."));
    for (const turn of path) {
      if ((turn.instructions ?? null) !== instructions) shown.push(this.#system(turn, turn === path[0]));
      instructions = turn.instructions ?? null;
      shown.push(this.#user(turn), this.#reply(turn));
    }
    this.section.replaceChildren(...(shown.length ? shown : [make("p", "greeting", greeting)]));
    if (had) this.#focus(had);
  }

  toEnd() {
    this.section.scrollTop = this.section.scrollHeight;
  }

  /** Show the text so far of the reply that is streaming. */
  grow(text) {
    this.section.lastElementChild.querySelector(".text").textContent = text;
    this.toEnd();
  }

  #button(text, act, name, label) {
    const button = Object.assign(make("button", "", text), { type: "button", onclick: act, disabled: this.isBusy });
    button.dataset.act = name;
    if (label) button.ariaLabel = button.title = label;
    return button;
  }

  #system(turn, isFirst) {
    const article = make("article", "system");
    const title = turn.instructions ? "System message" : "No system message";
    article.append(make("h2", "", isFirst ? title : `${title} from here on`));
    if (turn.instructions) article.append(make("div", "text", turn.instructions));
    return article;
  }

  #user(turn) {
    const article = make("article", "user");
    const tools = make("div", "tools");
    tools.append(this.#button("Edit", () => this.#edit(article, turn), `edit ${turn.id}`), ...this.#versions(turn));
    article.append(make("div", "text", turn.input), tools);
    return article;
  }

  /** Buttons to the sibling turns, which come from edits and repeated requests. */
  #versions(turn) {
    const all = this.tree.children(turn.parent);
    if (all.length < 2) return [];
    const at = all.indexOf(turn);
    const go = (text, other, label) => {
      const button = this.#button(text, () => this.look(other.id), `${label} ${turn.parent}`, label);
      button.disabled ||= !other;
      return button;
    };
    const place = make("span", "", `${at + 1} of ${all.length}`);
    return [go("‹", all[at - 1], "Previous version"), place, go("›", all[at + 1], "Next version")];
  }

  #edit(article, turn) {
    const text = Object.assign(document.createElement("textarea"), { value: turn.input, rows: 3, ariaLabel: "Edit the message" });
    const leave = () => {
      this.show(this.tree, { isBusy: this.isBusy });
      this.#focus(`edit ${turn.id}`);
    };
    const send = () => this.say(text.value, turn.parent);
    onEnter(text, send);
    text.addEventListener("keydown", (event) => event.key === "Escape" && !event.isComposing && leave());
    const tools = make("div", "tools");
    tools.append(this.#button("Send", send, "send"), this.#button("Cancel", leave, "leave"));
    article.replaceChildren(text, tools);
    text.focus();
  }

  #reply(turn) {
    const article = make("article", "reply");
    const tools = make("div", "tools");
    article.append(make("div", "text", turn.output));
    if (turn.usage) {
      const [bar, counts] = account(turn.usage);
      article.append(bar);
      tools.append(counts);
    }
    if (turn.status === "incomplete") tools.append(make("span", "", "cut at the maximum of reply tokens"));
    if (turn.status !== "in_progress") tools.append(this.#button("Again", () => this.say(turn.input, turn.parent), `again ${turn.id}`));
    article.append(tools);
    return article;
  }

  /** Restore the focus after a redraw; if the focused arrow is disabled now, focus the other one. */
  #focus(act) {
    const other = act.startsWith("Prev") ? act.replace("Previous", "Next") : act.replace("Next", "Previous");
    const buttons = [...this.section.querySelectorAll("button:enabled")];
    const of = (name) => buttons.find((button) => button.dataset.act === name);
    (of(act) ?? of(other))?.focus({ preventScroll: true });
  }
}

/** Send on Enter; Shift+Enter starts a new line. */
export function onEnter(text, send) {
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
}
