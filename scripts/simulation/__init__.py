"""What `simulate_serving.py` stands on: one GPU's part of a trace, memory to try, what is saved, a picture.

Called by: `scripts/simulate_serving.py`.
"""
