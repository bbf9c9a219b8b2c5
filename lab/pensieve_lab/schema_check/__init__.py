"""Parts of `check_schemas`: drawing schemas, judging replies, and turns under memory pressure."""
