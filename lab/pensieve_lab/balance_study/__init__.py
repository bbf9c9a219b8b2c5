"""Parts of `study_balance.py`, the study of load balancing rules."""
