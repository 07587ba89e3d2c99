"""Calico's dialect: converts messages of PolicySync (package ``felix``) and ``ext_authz`` to model values."""
