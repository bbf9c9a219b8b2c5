"""What launchers of cellular batching share: systems, requests, and how a load is served."""
