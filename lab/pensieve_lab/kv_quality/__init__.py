"""What storing KV state in fewer bits does to a model's answers: the parts of `measure_kv_quality.py`."""
