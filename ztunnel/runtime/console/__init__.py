"""What commands share: arguments, sub-commands, and output for terminals."""
