"""Programs of client libraries; each file runs in an environment that has its library, and not this project.

Owns: what the programs ask, and when an answer is right.
Does not know: this project, or how the files are run.
"""
