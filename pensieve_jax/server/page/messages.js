// The turns of the shown branch. Texts of users are shown as they are, replies as Markdown.

import { originBar, originWords, speedWords } from "./account.js";
import { copyButton } from "./copy.js";
import { make, makeButton, onEnter } from "./dom.js";
import { folded, ReplyBody, textOf } from "./reply.js";
import { speedOf } from "./speed.js";

const REST = 4; // a reply that grows is drawn for at most a fifth of the time
const NEAR_PX = 80; // a reader this near to the end follows the reply

export class Messages {
  /** `say(input, parent)` sends a turn; `look(id)` shows the branch of a turn. */
  constructor(section, { say, look }) {
    this.section = section;
    this.say = say;
    this.look = look;
    this.isBusy = false;
    this.frame = null; // of the next redraw of the reply that is streaming
    this.restsUntilMs = 0;
  }

  /** Show a tree's path, or `greeting` (paragraphs) if the tree is empty. */
  show(tree, { isBusy = false, greeting = [] } = {}) {
    this.tree = tree;
    this.isBusy = isBusy;
    this.#stopGrowing();
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
    this.section.replaceChildren(...(shown.length ? shown : [this.#greeting(greeting)]));
    this.section.ariaBusy = String(isBusy); // a reply is read out once it is complete
    if (had) this.#focus(had);
  }

  toEnd() {
    this.section.scrollTop = this.section.scrollHeight;
  }

  /** Show the items so far of the reply that is streaming, with the next frame after a rest. */
  grow(items) {
    this.frame ??= requestAnimationFrame(() => this.#grow(items));
  }

  #grow(items) {
    this.frame = null;
    const beganMs = performance.now();
    if (beganMs < this.restsUntilMs) return this.grow(items);
    const { scrollTop, scrollHeight, clientHeight } = this.section;
    this.running?.show(items, true);
    if (scrollHeight - scrollTop - clientHeight < NEAR_PX) this.toEnd();
    const endedMs = performance.now();
    this.restsUntilMs = endedMs + REST * (endedMs - beganMs);
  }

  #stopGrowing() {
    if (this.frame !== null) cancelAnimationFrame(this.frame);
    this.frame = this.running = null;
  }

  #greeting(paragraphs) {
    const greeting = make("div", "greeting");
    greeting.append(...paragraphs.map((text) => make("p", "", text)));
    return greeting;
  }

  #button(text, act, name, label) {
    const button = Object.assign(makeButton(text, act, label), { disabled: this.isBusy });
    button.dataset.act = name;
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
    const article = Object.assign(make("article", "user"), { ariaLabel: "You" });
    article.append(...(turn.results ?? []).map((text) => this.#result(text)));
    if (!turn.input) return article; // a client sent results only
    const tools = make("div", "tools");
    tools.append(this.#button("Edit", () => this.#edit(article, turn), `edit ${turn.id}`), ...this.#versions(turn));
    article.append(make("div", "text", turn.input), tools);
    return article;
  }

  /** A tool's result, which a client sent. */
  #result(text) {
    const result = folded("call", "arguments");
    result.firstChild.textContent = "Result of a tool";
    result.lastChild.textContent = text;
    return result;
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
    const article = Object.assign(make("article", "reply"), { ariaLabel: "Reply" });
    const isRunning = turn.status === "in_progress";
    const body = new ReplyBody();
    body.show(turn.output, isRunning);
    if (isRunning) this.running = body;
    article.append(body.element);
    if (turn.usage) article.append(originBar(turn.usage));
    if (!isRunning) article.append(this.#replyTools(turn));
    return article;
  }

  #replyTools(turn) {
    const [tools, told, buttons] = [make("div", "tools"), make("div", "account"), make("div", "buttons")];
    const speed = speedOf(turn.id);
    if (turn.usage) told.append(originWords(turn.usage));
    if (speed) told.append(speedWords(speed));
    if (turn.status === "incomplete") told.append(make("span", "", "cut at the maximum of reply tokens"));
    const again = () => this.say(turn.input, turn.parent);
    buttons.append(copyButton("reply", () => textOf(turn.output)));
    if (turn.input) buttons.append(this.#button("Again", again, `again ${turn.id}`));
    tools.append(told, buttons);
    return tools;
  }

  /** Restore the focus after a redraw; if the focused arrow is disabled now, focus the other one. */
  #focus(act) {
    const other = act.startsWith("Prev") ? act.replace("Previous", "Next") : act.replace("Next", "Previous");
    const buttons = [...this.section.querySelectorAll("button:enabled")];
    const of = (name) => buttons.find((button) => button.dataset.act === name);
    (of(act) ?? of(other))?.focus({ preventScroll: true });
  }
}
