"""Files that are copied beside vLLM's tests, and run in an environment of their own."""
