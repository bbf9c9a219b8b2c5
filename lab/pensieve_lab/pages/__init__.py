"""The pages of `docs/` and `lab/docs/`: what checks their figures, and what writes their tables.

`check_numbers.py` has `page`, `sources` and `expressions`; `refresh_pages.py` has the others, which take from
`experiments` how documents are read and compared.
"""
