"""Record lines in processes that tests start: Python imports this first where PYTHONPATH has its folder.

Owns: that the recording starts.
Does not know: how lines are recorded.
"""

from pensieve_lab.mutation.line_monitor import write_lines

write_lines()
