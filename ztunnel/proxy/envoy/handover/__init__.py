"""Open connections of Envoy's dialect that move to the process which replaces this one."""
