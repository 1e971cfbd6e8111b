"""Discovery of a row for an architecture that the table lacks: traced, proposed, verified, printed."""
