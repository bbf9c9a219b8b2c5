"""Programs of lm-eval, on a tiny task in a local file.

Owns: its programs.
Does not know: the server, or how an outcome is recorded.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import lm_eval
import trial
from lm_eval.tasks import TaskManager
from trial import check, program

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", OPENAI_API_KEY=trial.NO_KEY)
CHOICE = """\
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}]
"""
GENERATE = """\
task: tiny_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{max_gen_toks: 8, until: ["."]}}
metric_list: [{{metric: exact_match}}]
"""
DOCUMENTS = [
    {"question": "The capital of France is", "choices": [" Paris", " Rome"], "label": 0},
    {"question": "The capital of Italy is", "choices": [" Paris", " Rome"], "label": 1},
]


def evaluate(kind: str, task: str, path: str, **options: str) -> dict[str, float]:
    """Return the metrics of one task."""
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "tiny.jsonl"
        data.write_text("".join(f"{json.dumps(one)}\n" for one in DOCUMENTS), encoding="utf-8")
        (Path(directory) / "tiny.yaml").write_text(task.format(data=data), encoding="utf-8")
        name = task.split("\n")[0].removeprefix("task: ")
        arguments = {
            "model": trial.model(),
            "base_url": f"{trial.url()}/{path}",
            "num_concurrent": 1,
            "max_retries": 1,
            **options,
        }
        found = lm_eval.simple_evaluate(
            model=kind,
            model_args=arguments,
            tasks=[name],
            task_manager=TaskManager(include_path=directory, include_defaults=False),
            apply_chat_template=kind == "local-chat-completions",
            bootstrap_iters=0,
        )
    return found["results"][name]


@program("first", "local-chat-completions, generate_until")
def generate() -> None:
    found = evaluate("local-chat-completions", GENERATE, "chat/completions")
    check(any(name.startswith("exact_match") for name in found), found)


@program("other", "local-completions, multiple_choice")
def choice() -> None:
    found = evaluate(
        "local-completions",
        CHOICE,
        "completions",
        tokenizer_backend="huggingface",
        tokenizer=os.environ["TRIAL_TOKENIZER"],
        tokenized_requests="False",
    )
    check(any(name.startswith("acc") for name in found), found)


if __name__ == "__main__":
    trial.main()
