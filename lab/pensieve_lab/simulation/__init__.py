"""What `simulate_serving.py` stands on: one part of a trace, memory to try, what is saved, a picture."""
