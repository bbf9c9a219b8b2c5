"""What `pensieve COMMAND` runs: installed launchers, and what they share with `scripts/`."""

import os

# XLA writes its own pages to stderr where memory runs out, before it raises what launchers tell in one line.
# It reads this when it is loaded, which is later than this package.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
