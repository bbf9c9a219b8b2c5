// Programs of the Codex CLI, which runs one task without a terminal.
import { spawnSync } from "node:child_process";
import { mkdtempSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { check, HELLO, main, model, NO_KEY, program, url } from "./trial.mjs";

// Codex offers a web search and a namespace of tools for other agents by default.
const FUNCTIONS_ONLY = 'web_search = "disabled"\n[features]\nmulti_agent = false\ncollab = false\n';

function codex(prompt, settings = "") {
  const home = mkdtempSync(join(import.meta.dirname, "home-"));
  const provider = `[model_providers.served]\nname = "served"\nbase_url = "${url}"\nenv_key = "SERVED_KEY"\nwire_api = "responses"\n`;
  const retries = "request_max_retries = 0\nstream_max_retries = 0\n";
  const first = `model = "${model}"\nmodel_provider = "served"\n`;
  writeFileSync(join(home, "config.toml"), `${first}${settings}${provider}${retries}`);
  const done = spawnSync(
    join(import.meta.dirname, "node_modules", ".bin", "codex"),
    ["exec", "--skip-git-repo-check", "--sandbox=danger-full-access", prompt],
    { cwd: home, encoding: "utf8", env: { ...process.env, CODEX_HOME: home, SERVED_KEY: NO_KEY }, input: "", timeout: 90_000 },
  );
  check(done.status === 0, `${done.stdout}\n${done.stderr}`.slice(-1500));
  return `${done.stdout}\n${done.stderr}`;
}

program("first", "codex exec", async () => {
  check(codex(HELLO).includes("How can I help"), "another answer");
});
program("other", "codex exec, functions only", async () => {
  check(codex(HELLO, FUNCTIONS_ONLY).includes("How can I help"), "another answer");
});
program("tool", "codex exec, functions only", async () => {
  const output = codex("Run the command: echo $((40 + 2))", FUNCTIONS_ONLY);
  check(output.includes("It printed 42"), output.slice(-300));
});

await main();
