"""Values that every layer speaks of: parameters, conversations, outputs, time, errors."""
