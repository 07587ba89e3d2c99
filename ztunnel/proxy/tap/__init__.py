"""Captures the decrypted traffic of one pod, in a format that Wireshark opens."""
