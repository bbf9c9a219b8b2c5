// The dialog that renames or deletes a conversation.

import { get, post, Refused, remove } from "./api.js";
import { nameOf } from "./list.js";

const $ = (id) => document.getElementById(id);

export class ManageDialog {
  /** `changed(root, isDeleted)` is called after a change. */
  constructor(dialog, { changed }) {
    Object.assign(this, { dialog, changed, row: null });
    $("manage-form").onsubmit = (event) => {
      event.preventDefault();
      this.#run(this.#rename);
    };
    $("manage-delete").onclick = () => this.#ask(true);
    $("manage-keep").onclick = () => this.#ask(false);
    $("manage-confirm").onclick = () => this.#run(this.#delete);
    $("manage-cancel").onclick = () => dialog.close();
  }

  open(row) {
    this.row = row;
    $("manage-name").value = row.title ?? "";
    $("manage-name").placeholder = row.first_text || "(no text)";
    $("manage-turns").textContent = row.num_turns === 1 ? "its turn" : `its ${row.num_turns} turns`;
    $("manage-subject").textContent = nameOf(row);
    this.#tell("");
    this.#ask(false);
    this.dialog.showModal();
    $("manage-name").focus();
  }

  /** Show the question whether to delete, or the name again. */
  #ask(isAsking) {
    $("manage-form").hidden = isAsking;
    $("manage-question").hidden = !isAsking;
    (isAsking ? $("manage-keep") : $("manage-delete")).focus();
  }

  #tell(text) {
    $("manage-problem").textContent = text;
  }

  async #run(change) {
    this.#tell("");
    for (const button of this.dialog.querySelectorAll("button")) button.disabled = true;
    let isDone = false;
    try {
      await change.call(this);
      isDone = true;
    } catch (error) {
      if (!(error instanceof Refused || error instanceof TypeError)) throw error;
      this.#tell(error instanceof Refused ? error.message : "The server cannot be reached.");
    } finally {
      for (const button of this.dialog.querySelectorAll("button")) button.disabled = false;
    }
    if (!isDone) return;
    this.dialog.close();
    await this.changed(this.row.root, change === this.#delete);
  }

  async #rename() {
    await this.#setTitle($("manage-name").value.trim() || null);
  }

  #setTitle(title) {
    return post(`/v1/pensieve/trees/${this.row.root}`, { title });
  }

  /** Delete all responses of the tree, the last ones first, so that what remains after a failure is whole. */
  async #delete() {
    for (let left = this.row.num_turns; left > 0; ) {
      const tree = await get(`/v1/pensieve/trees/${this.row.root}`).catch(unlessGone); // it may have the last turns only
      if (!tree) break;
      for (const turn of tree.data.reverse()) await remove(`/v1/responses/${turn.id}`).catch(unlessGone);
      left -= tree.data.length;
    }
    if (this.row.title) await this.#setTitle(null);
  }
}

/** Take a 404 as done: the response or the tree is not there any more. */
function unlessGone(error) {
  if (error.status !== 404) throw error;
  return null;
}
