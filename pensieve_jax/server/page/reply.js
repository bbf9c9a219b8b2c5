// One reply: its reasoning and calls, folded, and its text. Its items are those of a response's `output`.

import { make } from "./dom.js";
import { showMarkdown } from "./markdown.js";

/** The text of a reply's messages. */
export const textOf = (items) => items.filter((item) => item.type === "message").map(textOfItem).join("\n\n");

const textOfItem = (item) => (item.content ?? []).map((part) => part.text ?? "").join("");

const hasBegun = (item) => Boolean(item.type === "function_call" || textOfItem(item));

/** Arguments of a call, indented if they are complete JSON. */
function argumentsOf(call) {
  try {
    return JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch {
    return call.arguments;
  }
}

const KINDS = {
  message: {
    make: () => make("div", "text"),
    show: (element, item) => showMarkdown(element, textOfItem(item)),
  },
  reasoning: {
    make: () => folded("reasoning", "thought"),
    show: (element, item, isOpen) => {
      element.firstChild.textContent = isOpen ? "Reasoning…" : "Reasoning";
      element.lastChild.textContent = textOfItem(item);
    },
  },
  function_call: {
    make: () => folded("call", "arguments"),
    show: (element, item, isOpen) => {
      element.firstChild.textContent = `${isOpen ? "Calls" : "Called"} ${item.name}`;
      element.lastChild.textContent = argumentsOf(item);
    },
  },
};

/** Make a folded text: `body` is its last child. */
export function folded(className, inner) {
  const details = make("details", className);
  const body = Object.assign(make("pre", inner), { tabIndex: 0 }); // it scrolls
  details.append(make("summary"), body);
  return details;
}

function waitingSign() {
  const sign = make("p", "waiting");
  const dots = Object.assign(make("span", "dots"), { ariaHidden: "true" });
  dots.append(make("i"), make("i"), make("i"));
  sign.append(dots, " Waiting for the first token");
  return sign;
}

/** The shown items of one reply, which grow while it streams. */
export class ReplyBody {
  constructor() {
    this.element = make("div", "items");
    this.shown = []; // {item, element, key}
    this.sign = waitingSign();
  }

  /** Show `items`; with `isRunning`, the last one is still growing. */
  show(items, isRunning) {
    items.forEach((item, index) => this.#showItem(item, index, isRunning && index === items.length - 1));
    if (isRunning && !items.some(hasBegun)) this.element.append(this.sign);
    else this.sign.remove();
  }

  #showItem(item, index, isOpen) {
    const kind = KINDS[item.type];
    if (!kind || !hasBegun(item)) return;
    const row = (this.shown[index] ??= { element: this.element.appendChild(kind.make()) });
    const key = `${isOpen} ${item.arguments ?? textOfItem(item)}`;
    if (row.key === key) return;
    row.key = key;
    kind.show(row.element, item, isOpen);
  }
}

/** The items of a reply that streams, from the events of its response. */
export class StreamedItems {
  constructor() {
    this.items = [];
  }

  /** Take an event; return whether it has a piece of the reply. */
  take(event) {
    if (event.type === "response.output_item.added") {
      this.items[event.output_index] = structuredClone(event.item);
      return event.item.type === "function_call";
    }
    const item = this.items[event.output_index];
    if (event.type === "response.function_call_arguments.delta") item.arguments += event.delta;
    else if (event.type === "response.output_text.delta" || event.type === "response.reasoning_text.delta")
      this.#part(item, event.content_index).text += event.delta;
    else return false;
    return true;
  }

  #part(item, index) {
    item.content ??= [];
    return (item.content[index] ??= { text: "" });
  }
}
