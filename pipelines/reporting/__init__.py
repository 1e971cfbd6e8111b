"""The report of a run: its measurements (`gather`), as tables, figures, Markdown and one self-contained page."""
