// The other fields of a request. They are stored in sessionStorage, so that a reload keeps them.

const STORE = "pensieve-settings";

export class Settings {
  constructor({ instructions, temperature, maxTokens }) {
    this.fields = { instructions, temperature, maxTokens };
    this.isNew = true; // without turns, an edited system message is the default of new conversations
    const saved = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
    for (const [name, field] of Object.entries(this.fields)) {
      field.value = saved[name] ?? field.value;
      field.addEventListener("change", () => {
        if (name === "instructions" && !this.isNew) return; // it is stored with the next response instead
        saved[name] = field.value;
        sessionStorage.setItem(STORE, JSON.stringify(saved));
      });
    }
    this.saved = saved;
  }

  get instructions() {
    return this.fields.instructions.value.trim() || null;
  }

  /** Show a conversation's system message; undefined means a conversation without turns. */
  show(instructions) {
    this.isNew = instructions === undefined;
    this.fields.instructions.value = (this.isNew ? this.saved.instructions : instructions) ?? "";
  }

  /** The fields of a request. */
  get sent() {
    const sent = { temperature: this.fields.temperature.valueAsNumber || 0 };
    sent.max_output_tokens = this.fields.maxTokens.valueAsNumber || 200;
    if (this.instructions) sent.instructions = this.instructions;
    return sent;
  }
}
