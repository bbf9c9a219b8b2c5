"""Makes pictures of the server's page for the documentation, from a conversation with the packaged model.

    python -m pensieve_lab.programs.picture_page --output_dir=docs/page

The program starts a server on a free port with its own history, drives Debian's `chromium-headless-shell`,
and stops both. Needs `pip install playwright`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from absl import flags

from pensieve_jax.commands.launch import run
from pensieve_lab.serving.page_visit import browsing, visiting
from pensieve_lab.serving.served import ServedProcess

FLAGS = flags.FLAGS
_SIZES = ("--model=chat", "--gpu_pages=64", "--cpu_pages=256", "--max_num_running=4", "--token_buckets=4,64")


def main() -> int:
    directory = Path(FLAGS.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as private,
        ServedProcess([*_SIZES, f"--history={private}/chats.sqlite"]) as server,
        browsing() as browser,
        visiting(server.address, browser=browser) as visit,
    ):
        visit.say("Hi! My name is Ada. I am looking for a place to eat in San Jose.")
        visit.say("Italian please, something cheap.")
        visit.say("Is there some place in Oakland?")
        visit.press("Push out")
        visit.wait_for_chunks("host", at_least=2)
        visit.picture(directory / "pushed_out.png")
        visit.say("What is my name?")
        visit.edit(1, "Mexican please, something cheap.")
        visit.say("What is my name?")
        visit.wait_for_frame()
        visit.picture(directory / "forks.png")
        for name, size, dark in (("tablet", (768, 900), False), ("phone", (390, 844), True)):
            with visiting(visit.page.url, browser=browser, size=size, dark=dark, touch=True) as other:
                other.replies.last.wait_for()
                other.picture(directory / f"{name}.png")
    return 0


def define_flags() -> None:
    flags.DEFINE_string("output_dir", "docs/page", "Directory of the pictures.")


if __name__ == "__main__":
    define_flags()
    run(main)
