"""Programs of the laboratory: `python -m pensieve_lab.programs.NAME`."""
