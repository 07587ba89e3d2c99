"""The node tunnel proxy: the application that combines tunnels, configuration and interception."""

from ztunnel.earlier_names import install

__version__ = "0.1.0"

install()
