"""What `pensieve COMMAND` runs: installed launchers, and what they share with `scripts/`."""
