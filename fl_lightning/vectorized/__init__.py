"""Clients side by side: groups of a cohort, each trained as one program over stacked tensors."""
