"""From a user's function to a pure function of explicit tensors."""
