// Programs of the Codex CLI, which runs one task without a terminal.
import { spawnSync } from "node:child_process";
import { mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { check, HELLO, main, model, NO_KEY, program, url } from "./trial.mjs";

function codex(prompt) {
  const home = mkdtempSync(join(tmpdir(), "codex-"));
  const provider = `name = "served"\nbase_url = "${url}"\nenv_key = "SERVED_KEY"\nwire_api = "responses"\n`;
  writeFileSync(
    join(home, "config.toml"),
    `model = "${model}"\nmodel_provider = "served"\n[model_providers.served]\n${provider}request_max_retries = 0\nstream_max_retries = 0\n`,
  );
  const done = spawnSync(
    join(import.meta.dirname, "node_modules", ".bin", "codex"),
    ["exec", "--skip-git-repo-check", "--sandbox=read-only", prompt],
    { cwd: home, encoding: "utf8", env: { ...process.env, CODEX_HOME: home, SERVED_KEY: NO_KEY }, input: "", timeout: 90_000 },
  );
  check(done.status === 0, `${done.stdout}\n${done.stderr}`.slice(-1500));
  return done.stdout;
}

program("first", "codex exec", async () => {
  check(codex(HELLO).includes("How can I help"), "another answer");
});

await main();
