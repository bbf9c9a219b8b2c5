"""Parts of `simulate_serving.py`: sampling a trace, choosing memory sizes, measuring savings, drawing
them."""
