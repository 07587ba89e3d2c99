"""What the proxy tells about itself: statistics, access logs, log lines."""
