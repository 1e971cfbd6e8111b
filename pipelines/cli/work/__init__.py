"""What each command does: imported only when the command runs."""
