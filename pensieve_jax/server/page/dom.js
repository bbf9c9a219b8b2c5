// Small helpers that make elements.

/** Make an element; `text` is set as text, never as HTML. */
export const make = (tag, className = "", text = "") =>
  Object.assign(document.createElement(tag), { className, textContent: text });

/** Make a button that is not the submit button of a form. */
export const makeButton = (text, onclick, label = "") => {
  const button = Object.assign(make("button", "", text), { type: "button", onclick });
  if (label) button.ariaLabel = button.title = label;
  return button;
};

/** Send on Enter; Shift+Enter starts a new line. */
export function onEnter(text, send) {
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
}
