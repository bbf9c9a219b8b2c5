"""The figures of the paper and of the thesis as named experiments, and studies beside them.

Owns: their parameters, and what is made of the simulator's figures. Each experiment is a value in `registry`:
a list of independent points to simulate, and a function from what they gave to tables, panels and a document.
Does not know: flags, files or output (`pensieve_lab.programs.reproduce`).
"""
