"""Parts of `measure_kv_quality.py`, which measures how KV cache quantization affects a model's answers."""
