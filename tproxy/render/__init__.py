"""Converts resources to netlink messages and back, and to the text of nft, ip and iptables."""
