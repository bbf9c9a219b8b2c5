"""Start recording lines in processes that tests start.

Owns: the start of the recording.
Does not know: how lines are recorded.
Called by Python, which imports this module first if PYTHONPATH contains its folder.
"""

from pensieve_lab.mutation.line_monitor import write_lines

write_lines()
