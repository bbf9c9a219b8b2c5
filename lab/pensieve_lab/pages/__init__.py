"""The pages of `docs/` and `lab/docs/`: checks of their figures, and generation of their tables.

`check_numbers.py` uses `page`, `sources` and `expressions`. `refresh_pages.py` uses the others, which read
and compare documents as `experiments` does.
"""
