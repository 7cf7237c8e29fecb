"""Imitates the parts of Lightning that a module sees, and holds all its private names."""
