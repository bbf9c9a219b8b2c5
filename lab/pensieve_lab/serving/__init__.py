"""Parts of the serving benchmarks: systems, users, runs, reports."""
