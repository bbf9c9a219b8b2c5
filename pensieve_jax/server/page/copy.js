// Copying to the clipboard, and the button for it.

import { make, makeButton } from "./dom.js";

const SHOWN_MS = 2000;

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // A page over plain HTTP from another machine has no `navigator.clipboard`.
  const area = Object.assign(make("textarea", "offscreen"), { value: text, readOnly: true });
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  if (!isCopied) throw new Error("refused");
}

/** Make a button that copies what `textOf` returns; `what` names it, as in "Copy code". */
export function copyButton(what, textOf) {
  const name = `Copy ${what}`;
  const show = (text, label) => Object.assign(button, { textContent: text, ariaLabel: label });
  const button = makeButton("Copy", async () => {
    const isCopied = await copy(textOf()).then(() => true, () => false);
    show(isCopied ? "Copied" : "Not allowed", isCopied ? "Copied" : "The browser does not allow to copy");
    setTimeout(() => show("Copy", name), SHOWN_MS);
  });
  button.ariaLabel = name;
  button.classList.add("copy");
  return button;
}
