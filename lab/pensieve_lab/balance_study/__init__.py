"""Parts of `study_balance.py`."""
