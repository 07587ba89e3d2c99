"""The part of :mod:`tproxy` that touches the kernel: namespaces, netlink, sockets."""
