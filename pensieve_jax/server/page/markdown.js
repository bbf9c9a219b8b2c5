// Markdown as elements. `marked` parses it and DOMPurify removes what a reply may not contain; both are unchanged
// copies in vendor/. HTML in a reply is shown as text.
//
// A text that grows is rendered from its last block on. The parser's time grows with the square of a paragraph's length
// if emphasis opens and does not close, so a paragraph that is too long, and all that remains of a text whose
// paragraphs have taken too long, is shown without emphasis, links and code.

import { copyButton } from "./copy.js";
import { make } from "./dom.js";
import { Lexer, Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js"; // defines globalThis.DOMPurify

const MAX_DEPTH = 50; // of blocks within blocks
const MAX_PARAGRAPH = 4000; // characters
const MAX_PARSING_MS = 100; // of the paragraphs of one call

const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escaped = (text) => text.replace(/[&<>"']/g, (character) => ENTITIES[character]);

const marked = new Marked({
  gfm: true,
  breaks: true, // models write one line below the other and mean it
  renderer: {
    html: ({ text, block }) => (block ? `<p>${escaped(text)}</p>` : escaped(text)),
    image: ({ raw }) => escaped(raw), // it would be loaded from elsewhere
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

const ALLOWED = {
  ALLOWED_TAGS: [
    ...["h1", "h2", "h3", "h4", "h5", "h6", "p", "br", "hr", "blockquote", "ul", "ol", "li", "pre", "code"],
    ...["strong", "em", "del", "a", "table", "thead", "tbody", "tr", "th", "td"],
  ],
  ALLOWED_ATTR: ["href", "title", "class", "start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** The parser's lexer. From the time `untilMs` on it leaves paragraphs as they are. Throws RangeError for deep blocks. */
class BoundedLexer extends Lexer {
  constructor(links = {}, untilMs = 0) {
    super(marked.defaults);
    Object.assign(this.tokens.links, links);
    this.untilMs = untilMs;
    this.depth = 0;
  }

  blockTokens(...rest) {
    if (this.depth === MAX_DEPTH) throw new RangeError("blocks are nested too deeply");
    this.depth++;
    const tokens = super.blockTokens(...rest);
    this.depth--;
    return tokens;
  }

  inlineTokens(text, tokens = []) {
    if (text.length <= MAX_PARAGRAPH && performance.now() < this.untilMs) return super.inlineTokens(text, tokens);
    for (const line of text.split("\n")) tokens.push({ type: "text", raw: line, text: line }, { type: "br", raw: "\n" });
    tokens.pop();
    return tokens;
  }
}

/** Return `work()`, or `otherwise` for blocks that are nested too deeply. */
function unlessTooDeep(work, otherwise) {
  try {
    return work();
  } catch (error) {
    if (!(error instanceof RangeError)) throw error; // also of a stack that is full
    return otherwise;
  }
}

/** Return the texts of a Markdown text's outermost blocks, and the targets of links that they name. */
function blocksOf(text) {
  const lexer = new BoundedLexer();
  const blocks = unlessTooDeep(() => lexer.blockTokens(text.replaceAll(/\r\n?/g, "\n"), lexer.tokens), [{ raw: text }]);
  return { texts: blocks.map((block) => block.raw), links: lexer.tokens.links };
}

const parsed = (text, links, untilMs) =>
  unlessTooDeep(() => marked.parser(new BoundedLexer(links, untilMs).lex(text)), `<pre>${escaped(text)}</pre>`);

const shown = new WeakMap(); // of each element: {names, finished: texts of blocks, last: nodes of the last block}

/** Show a Markdown text as the only content of an element. All blocks but the last one stay while a text grows. */
export function showMarkdown(element, text) {
  const { texts, links } = blocksOf(text);
  const names = JSON.stringify(links);
  const before = shown.get(element);
  const stays = before?.names === names && before.finished.every((block, index) => block === texts[index]);
  if (stays) for (const node of before.last) node.remove();
  else element.replaceChildren();
  const untilMs = performance.now() + MAX_PARSING_MS;
  const add = (blocks) => {
    if (!blocks.length) return [];
    const nodes = [...elementsOf(parsed(blocks.join(""), links, untilMs)).childNodes];
    element.append(...nodes);
    return nodes;
  };
  const end = Math.max(texts.length - 1, 0);
  add(texts.slice(stays ? before.finished.length : 0, end));
  shown.set(element, { names, finished: texts.slice(0, end), last: add(texts.slice(end)) });
}

/** Return a fragment of the elements that a reply may contain. */
function elementsOf(html) {
  const fragment = globalThis.DOMPurify.sanitize(html, ALLOWED);
  for (const link of fragment.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const table of fragment.querySelectorAll("table")) table.replaceWith(scrolling(table));
  for (const block of fragment.querySelectorAll("pre")) block.replaceWith(withHeader(block));
  return fragment;
}

/** Put a wide element into a box that scrolls, also with the keyboard. */
function scrolling(element) {
  const box = Object.assign(make("div", "wide"), { tabIndex: 0 });
  box.append(element.cloneNode(true));
  return box;
}

function withHeader(block) {
  const language = /language-(\S+)/.exec(block.firstElementChild?.className)?.[1] ?? "";
  const [box, header] = [make("div", "code"), make("div", "code-header")];
  header.append(make("span", "", language), copyButton("code", () => block.textContent));
  box.append(header, Object.assign(block.cloneNode(true), { tabIndex: 0 }));
  return box;
}
