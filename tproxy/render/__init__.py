"""Resources in other people's forms: netlink messages and back, nft's text for people."""
