"""What profile_parallel and run_figure11 need: steps that several devices share, and a run in parts."""
