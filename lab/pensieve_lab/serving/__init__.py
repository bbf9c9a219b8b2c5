"""What launchers that serve load are made of: systems, users, runs, reports."""
