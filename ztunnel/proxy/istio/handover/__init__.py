"""Open connections that move to the process which replaces this one."""
