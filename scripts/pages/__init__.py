"""What checks the figures of the pages; see `scripts/check_numbers.py`."""
