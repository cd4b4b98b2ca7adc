"""What several methods do inside a step: line searches, damping, refinement, restarts, brackets."""
