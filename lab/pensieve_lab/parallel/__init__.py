"""Parts of profile_parallel and run_figure11: steps on several devices, and a run in several parts."""
