"""The node tunnel proxy: the application that joins tunnels, configuration and interception."""

__version__ = "0.1.0"
