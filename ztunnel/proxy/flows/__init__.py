"""The flight recorder: the last connections that ended, were refused or failed, in the shape of Hubble's flows."""
