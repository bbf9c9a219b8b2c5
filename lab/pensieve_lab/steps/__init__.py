"""What the launchers that time steps, copies and the host are made of."""
