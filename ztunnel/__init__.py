"""The node tunnel proxy: the application that joins tunnels, configuration and interception."""
