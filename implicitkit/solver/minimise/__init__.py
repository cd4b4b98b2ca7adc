"""Minimisers of a scalar function: one file a method."""
