"""Calico's dialect: messages of PolicySync (package ``felix``) and ``ext_authz``, as values of the model."""
