"""Captures of the decrypted streams of one pod, as Wireshark opens them."""
