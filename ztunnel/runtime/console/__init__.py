"""The common part of commands: arguments, sub-commands, and output for terminals."""
