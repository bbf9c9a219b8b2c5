// The panel with the map of the KV cache, which the server streams.

import { Refused, stream } from "./api.js";

const PAUSE_MS = 1000;

export class StatePanel {
  /** `reached` is called when the stream works again after a failure, `lost(error)` when it cannot start. */
  constructor({ map, unseen, chunkTokens }, { reached, lost }) {
    Object.assign(this, { map, unseen, chunkTokens, reached, lost });
    this.latest = null; // the map that the server sent last
    this.turn = null; // the turn whose branch is framed
    this.isBusy = false;
    this.rows = []; // rows of the list of conversations
    this.wake = () => {};
    new ResizeObserver(() => this.#draw()).observe(map.canvas.parentElement); // also when a drawer opens
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
  }

  show({ turn, isBusy, rows }) {
    Object.assign(this, { turn, isBusy, rows });
    this.#draw();
  }

  #draw() {
    if (!this.latest) return;
    const isFramed = this.map.draw(this.latest, this.turn, this.rows);
    this.unseen.hidden = !this.turn || this.isBusy || isFramed;
  }

  /** Watch the stream for as long as the page is open. `wake` restarts it, for example with a new key. */
  async watch() {
    for (let wasLost = false; ; ) {
      const mine = new AbortController();
      const waited = new Promise((resume) => (this.wake = () => (mine.abort(), resume())));
      let hasBegun = false;
      let pause_ms = PAUSE_MS;
      try {
        for await (this.latest of await stream("GET", "/v1/pensieve/chunks?stream=true", undefined, mine.signal)) {
          if (!hasBegun && wasLost) this.reached();
          hasBegun = true;
          wasLost = false;
          this.chunkTokens.textContent = this.latest.chunk_tokens;
          this.#draw();
        }
      } catch (error) {
        if (!(error instanceof Refused || error instanceof TypeError || error.name === "AbortError")) throw error;
        if (error.name !== "AbortError" && !hasBegun) {
          wasLost = true; // a broken stream gives no reason; the next attempt does
          this.lost(error);
          pause_ms = Math.max(PAUSE_MS, error.wait_ms ?? 0);
          if (error.status === 401) pause_ms = undefined; // wait until the user enters another key
        }
      }
      if (pause_ms !== undefined) setTimeout(this.wake, pause_ms);
      await waited;
    }
  }
}
