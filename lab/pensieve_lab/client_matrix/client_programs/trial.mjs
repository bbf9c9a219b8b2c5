// Runs the programs of one client and prints what became of each; trial.py describes the lines.
import { createInterface } from "node:readline";
import { inspect } from "node:util";

const MARK = "@trial ";
export const HELLO = "Hello";
export const NAME = "My name is Ada.";
export const ASK_NAME = "What is my name?";
export const ASK_WEATHER = "What is the weather in Paris?";
export const FACTS = "Paris has 2100000 inhabitants.";
export const NO_KEY = "none";
export const [url, model] = process.argv.slice(2, 4);

const programs = new Map();
let calls = [];

export function program(kind, name, run) {
  programs.set(`${kind}: ${name}`, run);
}

export function getWeather({ city }) {
  calls.push(city);
  return { Paris: "sunny, 21 degrees", Rome: "rainy, 15 degrees" }[city] ?? "unknown";
}

export const weatherParameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};

export function check(holds, found) {
  if (!holds) throw new Error(`found ${inspect(found, { depth: 4 }).slice(0, 300)}`);
}

export function checkWeather(answer) {
  check(calls.length === 1 && calls[0] === "Paris", { calls, answer });
  check(String(answer).includes("sunny"), answer);
}

function say(line) {
  process.stdout.write(`\n${MARK}${JSON.stringify(line)}\n`);
}

export async function main() {
  say({ programs: [...programs.keys()] });
  for await (const name of createInterface({ input: process.stdin })) {
    calls = [];
    let problem = null;
    try {
      await programs.get(name)();
    } catch (error) {
      console.error(error);
      problem = `${error?.name ?? "Error"}: ${error?.message ?? error}`.slice(0, 2000);
    }
    say({ problem });
  }
  process.exit(0);
}
