"""The report of a run: what was measured (`gather`), as tables, figures, Markdown and one self-contained page."""
