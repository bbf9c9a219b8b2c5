"""Commands of `pensieve COMMAND`, and code that they share with `scripts/`."""

import os

# When memory runs out, XLA writes pages to stderr before it raises the error that launchers report in one
# line. XLA reads this variable when it is loaded, which is after this package.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
