"""Values that all layers share: parameters, conversations, outputs, time and errors."""
