// A conversation as the server keeps it: a tree of turns, of which one path is shown. Of a long one the server
// tells the last turns only: a turn's parent may be one that is not here.

export class Tree {
  constructor(root = null) {
    this.root = root; // the part of a turn's id that all turns of the tree share
    this.turns = new Map(); // by response id
    this.tip = null;
  }

  /** Take a turn in: {id, parent, input, output, usage, status}. It becomes the tip. */
  add(turn) {
    this.turns.set(turn.id, turn);
    this.tip = turn.id;
  }

  /** The turns up to the tip, from the first or from the first that is here. */
  get path() {
    const turns = [];
    for (let turn = this.turns.get(this.tip); turn; turn = this.turns.get(turn.parent)) turns.unshift(turn);
    return turns;
  }

  children(parent) {
    return [...this.turns.values()].filter((turn) => turn.parent === parent);
  }

  /** Show the branch that goes on from a turn, by the newest of what followed. */
  show(id) {
    this.tip = id;
    for (let next = this.children(id); next.length; next = this.children(this.tip)) this.tip = next.at(-1).id;
  }
}
