"""Which idle chunk is worth least: eviction policies, what they cost, and the order that learns."""
