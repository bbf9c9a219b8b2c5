// The other fields of a request. They are stored in sessionStorage, so that a reload keeps them.

const STORE = "pensieve-settings";

/** Say what is wrong with a number, or "" if it may be sent. */
function problemOf(field) {
  if (field.validity.valid) return "";
  const name = field.labels[0].firstChild.textContent.trim();
  const limits = field.max ? `from ${field.min} to ${field.max}` : `of at least ${field.min}`;
  const value = field.validity.badInput ? "not a number" : field.value;
  return `${name} is ${value}; it must be a ${field.step === "any" ? "" : "whole "}number ${limits}.`;
}

export class Settings {
  /** `fields` are elements named like the request's fields; `instructions` is the system message. */
  constructor({ instructions, fields }) {
    this.instructionsField = instructions;
    this.fields = fields;
    this.isNew = true; // without turns, an edited system message is the default of new conversations
    this.saved = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
    for (const field of [instructions, ...fields]) {
      field.value = this.saved[field.name] ?? field.value;
      field.addEventListener("input", () => {
        if (field === instructions && !this.isNew) return; // it is stored with the next response instead
        this.saved[field.name] = field.value;
        sessionStorage.setItem(STORE, JSON.stringify(this.saved));
      });
    }
  }

  get instructions() {
    return this.instructionsField.value.trim() || null;
  }

  /** Show a conversation's system message; undefined means a conversation without turns. */
  show(instructions) {
    this.isNew = instructions === undefined;
    this.instructionsField.value = (this.isNew ? this.saved.instructions : instructions) ?? "";
  }

  /** What is wrong with the first field that cannot be sent, or "". */
  get problem() {
    return this.fields.filter((field) => field.type === "number").map(problemOf).find(Boolean) ?? "";
  }

  /** The fields of a request; an empty one is left to the server. */
  get sent() {
    const sent = this.instructions ? { instructions: this.instructions } : {};
    for (const field of this.fields) {
      if (field.value === "") continue;
      if (field.name === "effort") sent.reasoning = { effort: field.value };
      else sent[field.name] = field.valueAsNumber;
    }
    return sent;
  }
}
