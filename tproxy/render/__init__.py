"""Resources in other formats: as netlink messages, in both directions, and as the text of nft, ip and iptables."""
