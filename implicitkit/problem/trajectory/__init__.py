"""Trajectories ``dy/dt = rhs(t, y)``: what their equations are, how they are followed, and on which steps."""
