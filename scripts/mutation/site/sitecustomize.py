"""Record lines in processes that tests start: Python imports this first where PYTHONPATH has its folder."""

from mutation.line_monitor import write_lines

write_lines()
