"""A scripted model: a real server and engine whose tokens spell texts of a script.

Owns: a tiny model directory with a chat template that renders tools, the script, and the runner that makes
the engine choose its texts.
Does not know: clients, or what a program asks.
"""
