"""What a run leaves behind: its folder, metrics and plan."""
