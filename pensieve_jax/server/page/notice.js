// The line above the composer: the result of the user's last action, or why the stream of the map failed.

import { Refused } from "./api.js";

/** The text for a failure; rethrows errors that are neither an answer of the server nor a network failure. */
function reason(error) {
  if (error instanceof Refused) return error.message;
  if (error instanceof TypeError) return "The server cannot be reached.";
  throw error;
}

export class Notice {
  constructor(shown) {
    this.shown = shown;
    this.message = ""; // about the user's last action
    this.isWrong = false;
    this.passes = false; // whether the notice is removed when the server is reachable again
    this.streamError = ""; // about the stream of the map
  }

  tell(text, isWrong = false) {
    this.message = text;
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
    this.streamError = reason(error);
    this.#show();
  }

  reached() {
    this.streamError = "";
    if (this.passes) this.message = "";
    this.#show();
  }

  #show() {
    this.shown.textContent = this.message || this.streamError;
    this.shown.classList.toggle("wrong", this.message ? this.isWrong : true);
  }
}
