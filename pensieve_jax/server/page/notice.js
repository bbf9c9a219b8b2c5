// The line above the composer: what became of what was done, or why the server cannot be watched.

import { Refused } from "./api.js";

/** Why something failed; throws what is no answer of a server, nor the want of one. */
function reason(error) {
  if (error instanceof Refused) return error.message;
  if (error instanceof TypeError) return "The server cannot be reached.";
  throw error;
}

export class Notice {
  constructor(shown) {
    this.shown = shown;
    this.told = ""; // of what somebody did
    this.isWrong = false;
    this.passes = false; // that goes when the server is there again
    this.line = ""; // of the stream that is watched
  }

  tell(text, isWrong = false) {
    this.told = text;
    this.isWrong = isWrong;
    this.passes = false;
    this.#show();
  }

  refuse(error) {
    this.tell(reason(error), true);
    this.passes = !(error instanceof Refused) || error.status >= 500;
  }

  clear() {
    this.tell("");
  }

  lost(error) {
    this.line = reason(error);
    this.#show();
  }

  reached() {
    this.line = "";
    if (this.passes) this.told = "";
    this.#show();
  }

  #show() {
    this.shown.textContent = this.told || this.line;
    this.shown.classList.toggle("wrong", this.told ? this.isWrong : true);
  }
}
