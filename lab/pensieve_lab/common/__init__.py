"""Parts shared by programs: flags that become an engine configuration, tables, and reports."""
