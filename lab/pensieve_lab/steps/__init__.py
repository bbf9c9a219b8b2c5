"""Parts of the programs that time steps, copies and the host."""
