"""The figures of the paper and of the thesis as named experiments, and further studies.

Owns: their parameters, and what is derived from the simulator's figures. Each experiment is a value in
`registry`: a list of independent points to simulate, and a function from their results to tables, panels and
a document.
Does not know: flags, files or output.
Called by `programs.reproduce`.
"""
