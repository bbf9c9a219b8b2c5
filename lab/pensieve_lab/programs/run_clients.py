"""Runs programs of many client libraries against a server, and reports which work and why others do not.

    python -m pensieve_lab.programs.run_clients --directory=/tmp/clients --markdown=clients.md

Each client is installed in an environment of its own below `--directory`, from the package indexes. The first
run installs for minutes; a later one uses the environments again. A client that cannot be installed is listed
with the reason. The server is the scripted model's, so a failure is not the model's weakness. With
`--servers=scripted,chat` each program also runs with the chat model in the package. `--url` names a running
server instead. The last line is one JSON document (see `--json`); the exit status is 1 if a program failed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from absl import flags
from tqdm import tqdm

from pensieve_jax import ConfigError
from pensieve_jax.commands.help import require
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_jax.model_source import DEFAULT_MODEL, resolve_model
from pensieve_lab.client_matrix.catalogue import Client, load_clients
from pensieve_lab.client_matrix.causes import Result, result_of
from pensieve_lab.client_matrix.environments import Environments, NotInstalledError
from pensieve_lab.client_matrix.report import ClientResults, document, markdown, rows, summary
from pensieve_lab.client_matrix.running import Ended, NotStartedError, run_programs
from pensieve_lab.client_matrix.servers import SCRIPTED, Target, define_server_flags, given, started
from pensieve_lab.clients.recorder import Recorder
from pensieve_lab.scripted.model import make_model
from pensieve_lab.scripted.script import DEFAULT_SCRIPT
from pensieve_lab.serving.served import SERVE

FLAGS = flags.FLAGS
_SCRIPTED, _CHAT, _GIVEN = "scripted", "chat", "given"
_LAUNCHERS: Final = {
    _SCRIPTED: SCRIPTED,
    _CHAT: (*SERVE, "--model=chat"),
}
_SIZES: Final = ("--dtype=float32", "--gpu_pages=4000", "--max_num_running=8", "--token_buckets=16,512")
_LEFT_OPEN_S: Final = 2.0
_TOKENIZER_VARIABLE: Final = "TRIAL_TOKENIZER"
_COLUMNS: Final = ("server", "client", "version", "program", "outcome", "cause")


@contextlib.contextmanager
def server(name: str, directory: Path) -> Iterator[Target]:
    """Start a server of one kind, or take the given one, and close it afterwards."""
    if name == _GIVEN:
        yield given(directory)
        return
    tokenizer = directory / name
    if name == _SCRIPTED:
        tokenizer.mkdir(exist_ok=True)
        make_model(tokenizer, DEFAULT_SCRIPT)
    else:
        tokenizer = Path(resolve_model(DEFAULT_MODEL))
    with started(_LAUNCHERS[name], _SIZES) as address:
        yield Target(address, name, tokenizer)


def run_all(name: str, commands: dict[str, list[str]], all_results: Sequence[ClientResults]) -> None:
    """Run the programs of all installed clients with one server, and add their results."""
    with server(name, Path(FLAGS.directory)) as (address, model, tokenizer), Recorder(address) as recorder:
        installed = [one for one in all_results if one.client.name in commands]
        with tqdm(installed, desc=name, disable=None) as bar:
            for one in bar:
                bar.set_postfix_str(one.client.name)
                arguments = [f"{recorder.address}/v1", model]
                one.results[name] = list(
                    run_client(commands[one.client.name], arguments, recorder, tokenizer)
                )


def run_client(
    command: Sequence[str], arguments: Sequence[str], recorder: Recorder, tokenizer: Path
) -> Iterator[Result]:
    """Run every program of one client, and yield its result."""
    environment = {_TOKENIZER_VARIABLE: str(tokenizer)}
    num_before = len(recorder.exchanges)
    try:
        for ended in run_programs(command, arguments, FLAGS.timeout_s, environment):
            with contextlib.suppress(TimeoutError):  # a client may keep a stream open
                recorder.wait_for_all(_LEFT_OPEN_S)
            result = result_of(ended, recorder.exchanges[num_before:])
            num_before = len(recorder.exchanges)
            tqdm.write(f"{result.outcome:>12}  {Path(command[-1]).stem}: {result.name}")
            yield result
    except NotStartedError as error:
        yield result_of(Ended("first: start", str(error), False, 0.0), ())


def install(clients: Sequence[Client]) -> tuple[dict[str, list[str]], list[ClientResults]]:
    """Install all clients; return the commands of those that are, and a place for the results of each."""
    environments = Environments(Path(FLAGS.directory), FLAGS.install_s)
    commands, all_results = {}, [ClientResults(client) for client in clients]
    with tqdm(all_results, desc="installing", disable=None) as bar:
        for one in bar:
            bar.set_postfix_str(one.client.name)
            try:
                commands[one.client.name] = environments.command(one.client)
            except NotInstalledError as error:
                one.not_installed = str(error)
                tqdm.write(f"not installed: {one.client.name}: {error}")
    return commands, all_results


def main() -> int:
    names = [_GIVEN] if FLAGS.url else FLAGS.servers
    unknown = set(names) - {_SCRIPTED, _CHAT, _GIVEN}
    if unknown or not names:
        raise ConfigError("--servers", ",".join(names), f"some of {_SCRIPTED} and {_CHAT}")
    commands, all_results = install(load_clients(FLAGS.clients))
    for name in names:
        run_all(name, commands, all_results)
    every_row = rows(all_results)
    columns = ("server", "client", "version", "passed", "first program", "failed")
    print(table(columns, summary(all_results)))
    if FLAGS.markdown:
        text = markdown(columns, summary(all_results)) + "\n" + markdown(_COLUMNS, every_row)
        Path(FLAGS.markdown).write_text(text, encoding="utf-8")
    results = document(all_results)
    for name, counts in results["counts"].items():
        print(f"{name}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    print_document(json_line("client_matrix", results, units={"seconds": "s"}, device=device_name()))
    return EXIT_FAILED if any(row[4] != "passed" for row in every_row) else 0


def define_flags() -> None:
    flags.DEFINE_string("directory", None, "Directory of the clients' environments; it is made.")
    flags.DEFINE_list("clients", [], "Names of clients; default: all.")
    flags.DEFINE_list("servers", [_SCRIPTED], "Servers to start without --url: scripted, chat, or both.")
    define_server_flags()
    flags.DEFINE_float("timeout_s", 120.0, "Seconds that one program may take.", lower_bound=1.0)
    flags.DEFINE_float("install_s", 600.0, "Seconds that one installation may take.", lower_bound=1.0)
    flags.DEFINE_string("markdown", None, "File for the tables.")
    define_document_flag()
    require("directory")


if __name__ == "__main__":
    define_flags()
    run(main)
