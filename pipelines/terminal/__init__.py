"""Terminal output: progress, tables, captured output, unexpected errors."""
