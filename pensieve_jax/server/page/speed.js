// How fast replies came, as this browser saw it. The server does not store it; the tab keeps it for its latest replies.

const STORE = "pensieve-speeds"; // in sessionStorage
const MOST = 200;
const SHORTEST_S = 0.02; // pieces that came together tell nothing about the time between tokens

/** Measure one reply, from its request on. */
export class Speed {
  constructor() {
    this.start = performance.now();
    this.first = this.last = null;
  }

  /** A piece of the reply has come. */
  piece() {
    this.last = performance.now();
    this.first ??= this.last;
  }

  /**
   * Return {num_tokens, first_ms, last_ms, tokens_per_s} for a reply of `numTokens` tokens, with the times from the
   * request on; null for a reply without a piece. `tokens_per_s` is null if all pieces came together.
   */
  result(numTokens) {
    if (this.first === null) return null;
    const seconds = (this.last - this.first) / 1000;
    const rate = numTokens > 1 && seconds >= SHORTEST_S ? (numTokens - 1) / seconds : null;
    const [first_ms, last_ms] = [this.first - this.start, this.last - this.start];
    return { num_tokens: numTokens, first_ms, last_ms, tokens_per_s: rate };
  }
}

const stored = () => new Map(JSON.parse(sessionStorage.getItem(STORE) ?? "[]"));

/** Return the speed of a response that came in this tab, or undefined. */
export const speedOf = (id) => stored().get(id);

export function keepSpeed(id, speed) {
  const rows = [...stored().set(id, speed)].slice(-MOST);
  sessionStorage.setItem(STORE, JSON.stringify(rows));
}
