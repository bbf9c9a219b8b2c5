"""What profile_parallel needs: a step that several devices share, and what they tell each other in it."""
