"""Who may talk to whom."""
