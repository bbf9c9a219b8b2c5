// Markdown as elements. `marked` parses it and DOMPurify removes what a reply may not contain; both are unchanged
// copies in vendor/. HTML in a reply is shown as text.

import { copyButton } from "./copy.js";
import { make } from "./dom.js";
import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js"; // defines globalThis.DOMPurify

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

/** Return the HTML of a Markdown text; of one whose blocks are nested too deeply for the parser, the text itself. */
function parsed(text) {
  try {
    return marked.parse(text);
  } catch (error) {
    if (!(error instanceof RangeError)) throw error; // the parser calls itself for each level
    return `<pre>${escaped(text)}</pre>`;
  }
}

/** Return a fragment of elements for a Markdown text. */
export function markdown(text) {
  const fragment = globalThis.DOMPurify.sanitize(parsed(text), ALLOWED);
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
