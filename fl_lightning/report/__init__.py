"""Reports: what runs and studies have left, as one HTML page and as tables in Markdown, LaTeX and CSV.

Nothing in this package imports torch, and nothing writes into the folders that it reads.
"""
