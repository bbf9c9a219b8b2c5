// A conversation as the server stores it: a tree of turns; the page shows one path. The server sends only the last
// turns of a long conversation, so a turn's parent may be missing.

export class Tree {
  constructor(root = null) {
    this.root = root; // the part of a turn's id that all turns of the tree share
    this.turns = new Map(); // by response id
    this.tip = null;
  }

  /** Add a turn {id, parent, input, output (items), usage, status}, which becomes the tip. */
  add(turn) {
    this.turns.set(turn.id, turn);
    this.tip = turn.id;
  }

  /** The turns from the first one that is present to the tip. */
  get path() {
    const turns = [];
    for (let turn = this.turns.get(this.tip); turn; turn = this.turns.get(turn.parent)) turns.unshift(turn);
    return turns;
  }

  children(parent) {
    return [...this.turns.values()].filter((turn) => turn.parent === parent);
  }

  /** Show the branch through a turn, following the newest child of each turn. */
  show(id) {
    this.tip = id;
    for (let next = this.children(id); next.length; next = this.children(this.tip)) this.tip = next.at(-1).id;
  }
}
