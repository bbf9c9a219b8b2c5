"""What launch scripts share: flags that become an engine configuration, tables, and reports."""
