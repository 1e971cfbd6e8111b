"""What a person sees in the terminal: progress, tables, captured output, unexpected errors."""
