"""The live page of the admin port: shows values that either front end gathers (:mod:`ztunnel.proxy.ui.seen`)."""
