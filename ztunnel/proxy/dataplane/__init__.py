"""What both front ends do to one connection."""
