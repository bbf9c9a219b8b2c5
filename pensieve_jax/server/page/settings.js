// What is sent with a message besides it. Kept for this tab, so that it is there after a reload.

const STORE = "pensieve-settings";

export class Settings {
  constructor({ instructions, temperature, maxTokens }) {
    this.fields = { instructions, temperature, maxTokens };
    this.isNew = true; // no turn yet: what is typed as system message is for new conversations
    const kept = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
    for (const [name, field] of Object.entries(this.fields)) {
      field.value = kept[name] ?? field.value;
      field.addEventListener("change", () => {
        if (name === "instructions" && !this.isNew) return; // is kept with the response that it is sent with
        kept[name] = field.value;
        sessionStorage.setItem(STORE, JSON.stringify(kept));
      });
    }
    this.kept = kept;
  }

  get instructions() {
    return this.fields.instructions.value.trim() || null;
  }

  /** Show a conversation's system message; undefined is one that has not begun. */
  show(instructions) {
    this.isNew = instructions === undefined;
    this.fields.instructions.value = (this.isNew ? this.kept.instructions : instructions) ?? "";
  }

  /** The fields of a request. */
  get sent() {
    const sent = { temperature: this.fields.temperature.valueAsNumber || 0 };
    sent.max_output_tokens = this.fields.maxTokens.valueAsNumber || 200;
    if (this.instructions) sent.instructions = this.instructions;
    return sent;
  }
}
