"""The live page of the admin port. It shows values that a front end gathers (:mod:`ztunnel.proxy.ui.seen`)."""
